"""Connections whose peers read nothing: cut when their replies fill the memory.

A call on such a connection cannot be ended: gRPC keeps its reply until the bytes before it have
left. gRPC gives no handle on connections, so this looks at the sockets of the process, where the
kernel says how much the peer has yet to take. One thread at a time; the clock is injected.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

_log = structlog.get_logger(__name__)

PATIENCE_S = 2.0
"""A peer has taken nothing of a full socket for so long."""
_FULL_BYTES = 2**16
_LAST_STANDARD_FD = 2


class _Queue(NamedTuple):
    num_bytes: int
    since_s: float


class StuckConnections:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[tuple[int, int], _Queue] = {}

    def forget(self) -> None:
        """Memory is not short: whoever takes nothing may have his reasons."""
        self._queues.clear()

    def cut(self) -> None:
        """Shut those that have been stuck since PATIENCE_S ago. To be called now and then."""
        now_s = self._clock()
        before, self._queues = self._queues, {}
        for fd, inode, num_bytes in _full_sockets():
            queue = before.get((fd, inode))
            if queue is None or queue.num_bytes != num_bytes:
                queue = _Queue(num_bytes, now_s)
            if now_s - queue.since_s < PATIENCE_S:
                self._queues[fd, inode] = queue
            else:
                _log.warning("cut a connection whose peer reads nothing", unread_bytes=num_bytes)
                _shut(fd)


def _full_sockets() -> Iterator[tuple[int, int, int]]:
    """Descriptor, inode and bytes that the peer has not taken, of sockets with many of them."""
    try:
        fds = os.listdir("/proc/self/fd")
    except OSError:  # that takes a descriptor, and none is left
        return
    for fd in map(int, fds):
        if fd <= _LAST_STANDARD_FD:
            continue
        try:
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # SIOCOUTQ of unix(7) and tcp(7) has the number of the terminals' call.
            (num_bytes,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # closed since, or a socket that listens
            continue
        if num_bytes >= _FULL_BYTES:
            yield fd, status.st_ino, num_bytes


def _shut(fd: int) -> None:
    """gRPC, whose descriptor it stays, sees the end of the connection and closes it."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        connection.detach()
