"""The peer socket: a side door beside each Unix socket, for what gRPC cannot do.

See `prefixcache.rpc.peer_protocol` for the messages. Here are the connections, and the one thread
that serves them; what is asked for is answered by handlers, one for each kind of request, which
their owners give. No peer can hold the thread up: sockets do not block, a peer that has had no
answer is sent away after a while, one that reads no answers at once, requests, descriptors and
peers, in all and a user, are bounded, and what is behind a descriptor is not waited for. Handlers
run in the thread, so they must be quick.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from prefixcache.address import PEER_SUFFIX
from prefixcache.rpc.peer_protocol import (
    HEADER,
    MAX_REQUEST_BYTES,
    PeerMessage,
    message_of,
    receive,
    send,
)
from prefixcache.server.peer_process import open_pidfd, peer_of
from prefixcache.server.sent_descriptors import SentDescriptors
from prefixcache.server.unix_socket import SOCKET_MODE

_log = structlog.get_logger(__name__)

MAX_PEERS = 4096
"""A client has a connection for each kind of request that it makes."""
_USERS = 4
"""So many of them at least can be there at the same time, as one has that part of the peers."""
MAX_UNCLOSED_A_USER = 64
"""Descriptors; while so many cannot be closed, no more processes of the user are let in."""
FIRST_ANSWER_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 1.0
_BACKLOG = 128

Callback = Callable[[], None]


class PeerRefusedError(Exception):
    """A handler refuses a request; the message is the answer, and the connection ends."""


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """descriptors: what came with it. A handler removes those that it keeps; the rest are closed
    after it.
    """

    rest: bytes
    descriptors: list[int]


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """descriptors: the peer gets copies; they stay their owner's to close."""

    rest: bytes = b""
    descriptors: Sequence[int] = ()


class PeerConnection:
    """One connection of a process; used in the socket's thread only.

    Callbacks run in that thread, each once, and do not raise. There are none after the socket's
    `close` but for `on_end`.
    """

    def __init__(self, owner: PeerSocket, connected: socket.socket, opened_at_s: float) -> None:
        self.peer = peer_of(connected)
        self.opened_at_s = opened_at_s
        self.socket = connected
        self.received = bytearray()
        self.descriptors: list[int] = []
        self.was_answered = False
        self.had: set[PeerMessage] = set()
        """What is to be had once in a connection's life, and was: its handlers say so."""
        self.pidfd: int | None = None
        self.ends: list[Callback] = []
        self.process_ends: list[Callback] = []
        self._owner = owner

    def on_end(self, callback: Callback) -> None:
        """Call it once the connection is over: left by the peer, dropped, or the daemon's end."""
        self.ends.append(callback)

    def on_process_end(self, callback: Callback) -> None:
        """Call it once the process that connected has ended, however long after the connection.

        Until then it counts as a peer. Raises PeerRefusedError if it is gone already.
        """
        self._owner.watch_process(self)
        self.process_ends.append(callback)

    def forget_process(self) -> None:
        """Nobody is told any more when the process ends."""
        self.process_ends.clear()
        if self.pidfd is not None:
            self._owner.stop_watching(self)

    def close(self) -> None:
        """With all that the peer has sent, read or not."""
        with suppress(OSError):  # the peer has left
            self.socket.shutdown(socket.SHUT_RDWR)
        self.close_descriptors()
        while self._has_more():
            self.close_descriptors()
        self.socket.close()

    def close_descriptors(self) -> None:
        """Those that came, but for those that a handler has kept."""
        self._owner.sent.close(self.descriptors, self.peer.uid)

    def _has_more(self) -> bool:
        try:
            return bool(receive(self.socket, MAX_REQUEST_BYTES, self.descriptors))
        except ConnectionAbortedError:  # more descriptors than there may be
            return True
        except OSError:
            return False


Handler = Callable[[PeerConnection, PeerRequest], PeerAnswer]
"""Raises PeerRefusedError."""


def peer_socket_path(path: Path) -> Path:
    """The peer socket beside the daemon's socket at `path`."""
    return path.with_name(path.name + PEER_SUFFIX)


class PeerSocket:
    """All peer sockets of a daemon. `answer` and `listen` before `start`; `close` ends it all."""

    def __init__(
        self,
        *,
        max_peers: int = MAX_PEERS,
        max_peers_a_user: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_peers = max_peers
        self._max_peers_a_user = max_peers_a_user or -(-max_peers // _USERS)
        self._clock = clock
        self._handlers: dict[int, Handler] = {}
        self._open: dict[PeerConnection, None] = {}
        self._watched: dict[PeerConnection, None] = {}
        self._num_by_uid: Counter[int] = Counter()
        self.sent = SentDescriptors()
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._is_closing = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._begin_closing)
        self._thread = threading.Thread(target=self._run, name="peer-socket", daemon=True)

    @property
    def has_handlers(self) -> bool:
        """Without one there is nothing to connect for."""
        return bool(self._handlers)

    def answer(self, kind: PeerMessage, handler: Handler) -> None:
        """Requests of that kind are this handler's."""
        self._handlers[kind] = handler

    def listen(self, path: Path) -> None:
        """Make a socket at a path that this process has claimed. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        # Nobody can connect before `listen`.
        os.chmod(path, SOCKET_MODE)
        listener.listen(_BACKLOG)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._wake_write.close()
        if self._thread.is_alive():
            self._thread.join()
        for connection in list(self._watched):
            self.stop_watching(connection)
        for connection in list(self._open):
            self._drop(connection)
        for opened in (*self._listeners, self._wake_read):
            opened.close()
        self._selector.close()
        self.sent.end()

    # ---- in the thread

    def watch_process(self, connection: PeerConnection) -> None:
        """For `PeerConnection.on_process_end`."""
        if connection.pidfd is not None:
            return
        try:
            connection.pidfd = open_pidfd(connection.socket, connection.peer)
        except OSError as error:
            raise PeerRefusedError(
                f"the process that connected cannot be watched: {error}"
            ) from None
        self._watched[connection] = None
        ended = partial(self._process_ended, connection)
        self._selector.register(connection.pidfd, selectors.EVENT_READ, ended)

    def stop_watching(self, connection: PeerConnection) -> None:
        """For `PeerConnection.forget_process`."""
        assert connection.pidfd is not None
        del self._watched[connection]
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        connection.pidfd = None
        self._uncount(connection)

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                key.data()
            self._drop_silent()

    def _begin_closing(self) -> None:
        self._is_closing = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            # Out of file descriptors, for instance: it would come back at once, and for ever.
            if not isinstance(error, (BlockingIOError, ConnectionAbortedError)):
                _log.warning("no connection of a peer can be taken", problem=str(error))
                time.sleep(_LOOK_EVERY_S)
            return
        accepted.setblocking(False)
        try:
            connection = PeerConnection(self, accepted, self._clock())
        except OSError:  # gone already
            accepted.close()
            return
        uid = connection.peer.uid
        if not self._has_place(uid):
            _send(connection, PeerMessage.REFUSED, PeerAnswer(b"too many processes are connected"))
            connection.close()
            return
        self._open[connection] = None
        self._num_by_uid[uid] += 1
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._read, connection))

    def _has_place(self, uid: int) -> bool:
        return (
            self._num_by_uid.total() < self._max_peers
            and self._num_by_uid[uid] < self._max_peers_a_user
            and self.sent.num_unclosed(uid) < MAX_UNCLOSED_A_USER
        )

    def _read(self, connection: PeerConnection) -> None:
        try:
            data = receive(connection.socket, MAX_REQUEST_BYTES, connection.descriptors)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.received += data
        while (request := _next_request(connection.received)) is not None:
            stays = self._serve(connection, request)
            connection.close_descriptors()
            if not stays:
                self._drop(connection)
                return

    def _serve(self, connection: PeerConnection, message: bytes) -> bool:
        """Whether the connection stays."""
        kind, rest = message[:1], message[1:]
        handler = self._handlers.get(kind[0]) if kind else None
        try:
            if handler is None:
                raise PeerRefusedError("no request that this daemon knows")
            answer = handler(connection, PeerRequest(rest, connection.descriptors))
        except PeerRefusedError as error:
            _send(connection, PeerMessage.REFUSED, PeerAnswer(str(error).encode()))
            return False
        except Exception:  # noqa: BLE001 - the border: the others must get their answers
            _log.exception("a request of a peer failed")
            _send(connection, PeerMessage.REFUSED, PeerAnswer(b"internal error"))
            return False
        connection.was_answered = True
        return _send(connection, kind[0], answer)

    def _drop_silent(self) -> None:
        oldest_s = self._clock() - FIRST_ANSWER_TIMEOUT_S
        for connection in list(self._open):
            if not connection.was_answered and connection.opened_at_s <= oldest_s:
                self._drop(connection)

    def _drop(self, connection: PeerConnection) -> None:
        del self._open[connection]
        self._selector.unregister(connection.socket)
        connection.close()
        for callback in connection.ends:
            callback()
        self._uncount(connection)

    def _process_ended(self, connection: PeerConnection) -> None:
        self.stop_watching(connection)
        for callback in connection.process_ends:
            callback()
        connection.process_ends.clear()

    def _uncount(self, connection: PeerConnection) -> None:
        if connection not in self._open and connection not in self._watched:
            self._num_by_uid[connection.peer.uid] -= 1


def _send(connection: PeerConnection, kind: int, answer: PeerAnswer) -> bool:
    """False if the peer is gone, or leaves its answers unread."""
    try:
        return send(connection.socket, message_of(kind, answer.rest), answer.descriptors)
    except OSError:
        return False


def _next_request(received: bytearray) -> bytes | None:
    """Take the first whole request off the buffer; one that is too long counts as empty."""
    if len(received) < HEADER.size:
        return None
    (length,) = HEADER.unpack_from(received)
    if not 1 <= length <= MAX_REQUEST_BYTES:
        return b""
    end = HEADER.size + length
    if len(received) < end:
        return None
    request = bytes(received[HEADER.size : end])
    del received[:end]
    return request
