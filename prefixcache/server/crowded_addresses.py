"""Connections of a peer that has too many of them to one address: the newest are cut.

A peer is a user of this host, on a Unix socket, or else a host. gRPC only counts connections, and
asks nobody before it takes one. So this looks at the sockets of the process, where the kernel says
who is at the other end. A peer that comes again at once loses what it gets at the next look, and
whoever else got a place meanwhile keeps it. One thread at a time.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

import structlog

from prefixcache.server.own_sockets import OwnSocket, open_files, open_sockets, shut
from prefixcache.server.peer_process import peer_of

_log = structlog.get_logger(__name__)


class _Ends(NamedTuple):
    """address: path of a Unix socket, or port. peer: user, or host."""

    address: str | int
    peer: str | int


class CrowdedAddresses:
    """max_per_peer: of the connections to one address."""

    def __init__(self, max_per_peer: int) -> None:
        self._max_per_peer = max_per_peer
        self._addresses: set[str | int] = set()
        self._crowding: set[_Ends] = set()
        self._files: list[int] = []
        self._known: dict[OwnSocket, _Ends | None] = {}

    def add(self, address: str) -> None:
        """`unix:/path` or `host:port` is served."""
        scheme, _, path = address.partition(":")
        self._addresses.add(path if scheme == "unix" else int(address.rpartition(":")[2]))

    def cut(self) -> None:
        """To be called now and then, by which it learns which connections are older."""
        before, self._files = self._files, open_files()
        if len(self._files) <= self._max_per_peer // 2:
            self._known.clear()
            return
        # A look takes 4 to 10 us a socket.
        if self._files == before and not self._crowding:
            return
        self._cut_crowding()

    def _cut_crowding(self) -> None:
        before, self._crowding = self._crowding, set()
        for ends, connections in self._by_peer().items():
            too_many = connections[self._max_per_peer :]
            if not too_many:
                continue
            for connection in too_many:
                shut(connection)
            self._crowding.add(ends)
            if ends not in before:  # it may come again at once, time after time
                _log.warning(
                    "cut the newest connections of a peer that has too many",
                    address=ends.address,
                    user_or_host=ends.peer,
                    connections=len(connections),
                    limit=self._max_per_peer,
                )

    def _by_peer(self) -> dict[_Ends, list[OwnSocket]]:
        """Connections to the addresses, oldest first."""
        opened = set(open_sockets(self._files))
        known = {own: ends for own, ends in self._known.items() if own in opened}
        known |= {own: _ends_of(own) for own in sorted(opened - known.keys())}
        self._known = known
        by_peer: dict[_Ends, list[OwnSocket]] = {}
        for own, ends in known.items():
            if ends is not None and ends.address in self._addresses:
                by_peer.setdefault(ends, []).append(own)
        return by_peer


def _ends_of(own: OwnSocket) -> _Ends | None:
    """Of a connection that was accepted; None of other sockets."""
    try:
        connection = socket.socket(fileno=own.fd)
    except OSError:  # closed since
        return None
    try:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        if connection.family == socket.AF_UNIX:
            return _Ends(connection.getsockname(), peer_of(connection).uid)
        return _Ends(connection.getsockname()[1], connection.getpeername()[0])
    except OSError:  # it has ended
        return None
    finally:
        connection.detach()
