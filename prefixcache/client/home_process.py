"""The process that a client belongs to: a forked child has a copy of it, and must not use it.

gRPC does not know that a child writes on its parent's connection, so the child's calls would be
taken for the parent's, and closing the copy would shut the connection for both. So every way to a
connection asks `HomeProcess` first. Beyond that, a child lets go of its parent's connections at
once: what runs in it later, finalizers for instance, can do them no harm, and when the parent dies
the daemon sees its connection end, though the child lives.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import weakref

from prefixcache.address import PEER_SUFFIX, Address, TcpAddress, UnixAddress
from prefixcache.errors import ForkedClientError


class HomeProcess:
    """This process. address: where the client connects; None for a channel that is not its own."""

    def __init__(self, address: Address | None = None) -> None:
        self._pid = os.getpid()
        self._address = address
        if address is not None:
            _all.add(self)

    @property
    def is_here(self) -> bool:
        """False in a child."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises ForkedClientError in a child."""
        if not self.is_here:
            raise ForkedClientError(self._pid, "whose client this is; make another one here")

    def connects_to(self, peer: object) -> bool:
        """peer: the other end of a socket, as the kernel names it."""
        if isinstance(self._address, UnixAddress):
            path = self._address.path
            paths = (path, os.path.abspath(path))
            return peer in paths or peer in [path + PEER_SUFFIX for path in paths]
        assert self._address is not None
        return isinstance(peer, tuple) and _is_at(self._address, peer[0], peer[1])


_all: weakref.WeakSet[HomeProcess] = weakref.WeakSet()


class AsyncProcess:
    """The process that makes asyncio clients: gRPC's asyncio side does not work in its children."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def check(self) -> None:
        """To be called for each asyncio client. Raises ForkedClientError in a child."""
        if self._pid is None:
            self._pid = os.getpid()
        if self._pid != os.getpid():
            raise ForkedClientError(
                self._pid,
                "which has used an AsyncClient, and gRPC gives no other to its children: use a "
                "Client here, or start this process by spawn",
            )


def _is_at(address: TcpAddress, host: str, port: int) -> bool:
    """A name other than localhost cannot be told from other hosts without asking for it."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if address.host.lower() == "localhost":
        return port == address.port and ip.is_loopback
    return (str(ip), port) == (address.host, address.port)


def _let_go_of_connections() -> None:
    """In a child: put nothing in the place of each connection of its parent's clients."""
    homes = list(_all)
    if not homes:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        peer = _peer_of(fd)
        if peer and any(home.connects_to(peer) for home in homes):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _peer_of(fd: int) -> object:
    """None for what is no connection."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        connection = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        peer: object = connection.getpeername()
    except OSError:
        return None
    finally:
        connection.detach()
    return peer


os.register_at_fork(after_in_child=_let_go_of_connections)
