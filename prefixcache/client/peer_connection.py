"""A client's connection to the peer socket of a daemon; see `prefixcache.rpc.peer_protocol`.

Blocking, for a second at most at each step: a daemon answers at once. Not safe to use from many
threads. What was asked for is good for as long as the connection is open, on both sides: so it ends
with the process, and a client sees by `is_open` that the daemon has ended.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from prefixcache.address import PEER_SUFFIX, UnixAddress
from prefixcache.rpc.peer_protocol import (
    HEADER,
    MAX_ANSWER_BYTES,
    PeerMessage,
    message_of,
    receive,
    send,
)

_TIMEOUT_S = 1.0


class PeerRefusedError(ConnectionError):
    """The daemon refuses; the message is its reason."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """descriptors: the caller's to close."""

    rest: bytes
    descriptors: tuple[int, ...]


class PeerConnection:
    """Raises OSError: no such socket, not for this user, or no answer in time."""

    def __init__(self, address: UnixAddress) -> None:
        """address: of the daemon."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_TIMEOUT_S)
            self._socket.connect(address.path + PEER_SUFFIX)
        except OSError:
            self._socket.close()
            raise

    @property
    def is_open(self) -> bool:
        """A daemon that ends closes its side; it never sends unasked."""
        if self._socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def ask(
        self, kind: PeerMessage, rest: bytes = b"", descriptors: Sequence[int] = ()
    ) -> PeerAnswer:
        """descriptors: the daemon gets copies. Raises OSError; PeerRefusedError is one.

        The connection is of no more use then.
        """
        message = message_of(kind, rest)
        # A daemon that has hung up already may have said why.
        with suppress(BrokenPipeError):
            if not send(self._socket, message, descriptors):
                raise ConnectionAbortedError("the daemon does not read")
        received: list[int] = []
        try:
            (length,) = HEADER.unpack(self._read(HEADER.size, received))
            if not 1 <= length <= MAX_ANSWER_BYTES:
                raise ConnectionAbortedError("what answers is no daemon")
            answer = self._read(length, received)
            if answer[0] == PeerMessage.REFUSED:
                raise PeerRefusedError(answer[1:].decode(errors="replace"))
            if answer[0] != kind:
                raise ConnectionAbortedError("what answers is no daemon")
        except OSError:
            for descriptor in received:
                os.close(descriptor)
            raise
        return PeerAnswer(answer[1:], tuple(received))

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int, descriptors: list[int]) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = receive(self._socket, num_bytes - len(data), descriptors)
            if not part:
                raise ConnectionResetError("the daemon has closed the connection")
            data += part
        return data
