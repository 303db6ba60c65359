"""What a client shows a daemon that asks who calls: a token, a certificate, or its own user.

`Credentials` are the caller's choice. `Bearer` is what goes with each call of one client: the
token, or the ticket that a daemon on a Unix socket gives to a user of its host (see
`prefixcache.server.peer_tickets`). A ticket is asked for once the daemon has asked for credentials,
and again after its restart. Safe to use from many threads.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from prefixcache.address import Address, TcpAddress, UnixAddress
from prefixcache.client.peer_connection import PeerConnection
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc.peer_protocol import PeerMessage

_SCHEME = "Bearer "
_TOKEN = re.compile(r"[!-~]+")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """TLS to a TCP port. All are PEM.

    ca: whose certificates daemons must have; None: those that gRPC trusts by itself.
    cert, key: the client's own, for a daemon that asks for one; both or none.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("tls", "a certificate and its key go together")


@dataclass(frozen=True, slots=True)
class Credentials:
    """token: sent with every call. tls: None is plain TCP, or a Unix socket."""

    token: str | None = field(default=None, repr=False)
    tls: TlsCredentials | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise InvalidArgumentError("token", "must be printable ASCII without spaces")


NO_CREDENTIALS = Credentials()


def make_channel(grpc_or_aio: Any, address: Address, credentials: Credentials, options: Any) -> Any:
    """A channel of `grpc` or of `grpc.aio`. Raises InvalidArgumentError.

    A token goes to another machine over TLS only: whoever reads it on its way has it.
    """
    tls = credentials.tls
    if tls is not None:
        if isinstance(address, UnixAddress):
            raise InvalidArgumentError("tls", f"is for TCP, and {str(address)!r} is a Unix socket")
        shown = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
        return grpc_or_aio.secure_channel(address.target, shown, options)
    if credentials.token and isinstance(address, TcpAddress) and not address.is_loopback:
        raise InvalidArgumentError(
            "token", f"would go to {str(address)!r} in the clear; give TLS credentials too"
        )
    return grpc_or_aio.insecure_channel(address.target, options)


class Bearer:
    """What one client's calls carry.

    address: None for a channel of the caller's. version: goes up with each new ticket.
    """

    def __init__(self, credentials: Credentials, address: Address | None) -> None:
        self.version = 0
        self._metadata = _metadata(credentials.token) if credentials.token else None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._connection: PeerConnection | None = None
        self._address: UnixAddress | None = None
        if credentials.token is None and isinstance(address, UnixAddress):
            self._address = address

    def on(self, stub: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
        """The stub, whose calls carry it."""
        if self._address is None:
            metadata = self._metadata
            return stub if metadata is None else _with(stub, lambda: metadata)
        if is_stream:
            return _with(stub, self._fresh_metadata)
        return _with(stub, lambda: self._metadata)

    @property
    def token(self) -> str:
        """What is sent now, a ticket too; empty if it is nothing."""
        return self._metadata[0][1].removeprefix(_SCHEME) if self._metadata else ""

    def fresh_token(self) -> str:
        """`token`, after a new ticket if the daemon of the last one has ended.

        Waits for it, for a second at most.
        """
        self._fresh_metadata()
        return self.token

    def renew(self, version: int) -> bool:
        """A call was refused that had that version: whether there is a better one now.

        Waits for the daemon's answer, for a second at most.
        """
        if self._address is None:
            return False
        with self._lock:
            if self.version != version:
                return True
            is_good = self._connection is not None and self._connection.is_open
            return not is_good and self._take_ticket(self._address)

    def close(self) -> None:
        """The ticket ends. In a forked child nothing happens: the lock may be held for ever."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._disconnect()
            self._address = None

    def _fresh_metadata(self) -> Metadata | None:
        """Of what cannot be tried again like a call: a stream, for instance."""
        if self.version > 0:
            self.renew(self.version)
        return self._metadata

    def _take_ticket(self, address: UnixAddress) -> bool:
        self._disconnect()
        try:
            connection = PeerConnection(address)
        except OSError:
            return False
        try:
            ticket = connection.ask(PeerMessage.TICKET).rest.decode("ascii", errors="replace")
        except OSError:
            ticket = ""
        if not _TOKEN.fullmatch(ticket):
            connection.close()
            return False
        self._connection, self._metadata = connection, _metadata(ticket)
        self.version += 1
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _metadata(token: str) -> Metadata:
    return (("authorization", _SCHEME + token),)


def _with(stub: Callable[..., Any], metadata: Callable[[], Metadata | None]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return stub(*arguments, metadata=metadata(), **options)

    return call
