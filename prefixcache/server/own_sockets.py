"""The sockets that this process has open. gRPC gives no handle on its connections; the kernel does.

A descriptor that is not a socket is not touched: what it is, its link in `/proc/self/fd` says, and
the file system behind it, which may be a peer's (`sent_descriptors`), is not asked. Keeps no state.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

_FOLDER = "/proc/self/fd"
_LAST_STANDARD_FD = 2
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class OwnSocket(NamedTuple):
    """inode: the kernel's number of the socket, as descriptors are used again."""

    fd: int
    inode: int


def open_files() -> list[int]:
    """Descriptors of any kind, in order; none if there is none left to look with."""
    try:
        return sorted(map(int, os.listdir(_FOLDER)))
    except OSError:
        return []


def open_sockets(fds: Iterable[int]) -> Iterator[OwnSocket]:
    """Those of the descriptors that are sockets, but for the standard ones."""
    for fd in fds:
        inode = _inode(fd) if fd > _LAST_STANDARD_FD else None
        if inode is not None:
            yield OwnSocket(fd, inode)


def shut(own: OwnSocket) -> None:
    """Whose descriptor it is, which it stays, sees the end of the connection and closes it."""
    try:
        # Another one, which nobody else closes meanwhile.
        fd = os.dup(own.fd)
    except OSError:
        return
    if _inode(fd) != own.inode:
        os.close(fd)
        return
    with socket.socket(fileno=fd) as connection, suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _inode(fd: int) -> int | None:
    try:
        found = _SOCKET.fullmatch(os.readlink(f"{_FOLDER}/{fd}"))
    except OSError:  # closed since
        return None
    return int(found[1]) if found else None
