"""Tickets for users of this host: what a process on the peer socket is known by in calls.

gRPC does not tell a server who is at the other end of a Unix socket. So beside `NAME` there is
`NAME.peer`, where the kernel says it (SO_PEERCRED, unix(7)): a process that connects asks for a
ticket, random text which it then sends as the bearer token of its calls. A ticket is good for as
long as that connection is open, so it ends with the process.

Both ways a message is its length (4 bytes, big-endian), one byte that says what kind it is, and the
rest. The length counts the kind and the rest. Kinds: TICKET, asked for with an empty rest and
answered with the ticket; REFUSED, an answer whose rest says why; the connection is then closed.

One thread serves all connections, and no peer can hold it up: sockets do not block, a peer without
a ticket is sent away after a while, and their number is bounded, in all and a user.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from prefixcache.address import PEER_SUFFIX
from prefixcache.server.auth_file import token_hash
from prefixcache.server.unix_socket import SOCKET_MODE

_log = structlog.get_logger(__name__)

TICKET = 1
REFUSED = 0
HEADER = struct.Struct(">I")

MAX_PEERS = 1024
MAX_PEERS_A_USER = 256
FIRST_REQUEST_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 64
_LOOK_EVERY_S = 1.0
_BACKLOG = 128
_SO_PEERGROUPS = 59
_MAX_GROUPS_BYTES = 1024
"""The most that Python asks the kernel for."""
_CREDENTIALS = struct.Struct("=iII")
_GROUP = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Peer:
    """The user of a process at the time it connected, and its groups (only the first if it has
    more than 256).
    """

    uid: int
    gids: frozenset[int]


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    peer: Peer
    opened_at_s: float
    received: bytearray = field(default_factory=bytearray)
    ticket: str = ""


def peer_socket_path(path: Path) -> Path:
    """The peer socket beside the daemon's socket at `path`."""
    return path.with_name(path.name + PEER_SUFFIX)


class PeerTickets:
    """The tickets of all peer sockets of a daemon, and the thread that gives them out.

    `listen` before `start`; `close` ends all connections. `peer_with` may be called from any
    thread.
    """

    def __init__(
        self,
        *,
        max_peers: int = MAX_PEERS,
        max_peers_a_user: int = MAX_PEERS_A_USER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_peers, self._max_peers_a_user = max_peers, max_peers_a_user
        self._clock = clock
        self._by_digest: dict[bytes, Peer] = {}
        self._connections: dict[_Connection, None] = {}
        self._num_by_uid: Counter[int] = Counter()
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="peer-tickets", daemon=True)

    def peer_with(self, digest: bytes) -> Peer | None:
        """Who holds the ticket of that SHA-256 now."""
        return self._by_digest.get(digest)

    def listen(self, path: Path) -> None:
        """Make a socket at a path that this process has claimed. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        # Nobody can connect before `listen`.
        os.chmod(path, SOCKET_MODE)
        listener.listen(_BACKLOG)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._wake_write.close()
        if self._thread.is_alive():
            self._thread.join()
        for connection in list(self._connections):
            self._drop(connection)
        for opened in (*self._listeners, self._wake_read):
            opened.close()
        self._selector.close()

    # ---- in the thread

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                if key.fileobj is self._wake_read:
                    return
                if isinstance(key.data, _Connection):
                    self._read(key.data)
                else:
                    key.data(key.fileobj)
            self._drop_silent()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            # Out of file descriptors, for instance: it would come back at once, and for ever.
            if not isinstance(error, (BlockingIOError, ConnectionAbortedError)):
                _log.warning("no connection for a ticket can be taken", problem=str(error))
                time.sleep(_LOOK_EVERY_S)
            return
        accepted.setblocking(False)
        try:
            peer = _peer_of(accepted)
        except OSError:  # gone already
            accepted.close()
            return
        connection = _Connection(accepted, peer, self._clock())
        if (
            len(self._connections) >= self._max_peers
            or self._num_by_uid[peer.uid] >= self._max_peers_a_user
        ):
            self._answer(connection, REFUSED, b"too many processes have a ticket")
            accepted.close()
            return
        self._connections[connection] = None
        self._num_by_uid[peer.uid] += 1
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.received += data
        while (request := _next_request(connection.received)) is not None:
            if not self._serve(connection, request):
                self._drop(connection)
                return

    def _serve(self, connection: _Connection, request: bytes) -> bool:
        """Whether the connection stays."""
        if request != bytes([TICKET]):
            self._answer(connection, REFUSED, b"no request that this daemon knows")
            return False
        if not connection.ticket:
            connection.ticket = secrets.token_urlsafe(32)
            self._by_digest[token_hash(connection.ticket)] = connection.peer
        return self._answer(connection, TICKET, connection.ticket.encode())

    def _answer(self, connection: _Connection, kind: int, rest: bytes) -> bool:
        """False if the peer is gone, or leaves its answers unread."""
        message = HEADER.pack(1 + len(rest)) + bytes([kind]) + rest
        with suppress(OSError):
            return connection.socket.send(message, socket.MSG_NOSIGNAL) == len(message)
        return False

    def _drop_silent(self) -> None:
        oldest_s = self._clock() - FIRST_REQUEST_TIMEOUT_S
        for connection in list(self._connections):
            if not connection.ticket and connection.opened_at_s <= oldest_s:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.ticket:
            del self._by_digest[token_hash(connection.ticket)]
        del self._connections[connection]
        self._num_by_uid[connection.peer.uid] -= 1
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _next_request(received: bytearray) -> bytes | None:
    """Take the first whole request off the buffer; one that is too long counts as empty."""
    if len(received) < HEADER.size:
        return None
    (length,) = HEADER.unpack_from(received)
    if not 1 <= length <= _MAX_REQUEST_BYTES:
        return b""
    end = HEADER.size + length
    if len(received) < end:
        return None
    request = bytes(received[HEADER.size : end])
    del received[:end]
    return request


def _peer_of(accepted: socket.socket) -> Peer:
    data = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(data)
    try:
        groups = accepted.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        groups = b""  # more than fit: its own group alone counts
    return Peer(uid, frozenset((gid, *(group for (group,) in _GROUP.iter_unpack(groups)))))
