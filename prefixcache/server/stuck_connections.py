"""Connections whose peers read nothing: cut when their replies fill the memory.

A call on such a connection cannot be ended: gRPC keeps its reply until the bytes before it have
left. gRPC gives no handle on connections, so this looks at the sockets of the process, where the
kernel says how much the peer has yet to take. One thread at a time; the clock is injected.
"""

from __future__ import annotations

import fcntl
import struct
import termios
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

from prefixcache.server.own_sockets import OwnSocket, open_files, open_sockets, shut

_log = structlog.get_logger(__name__)

PATIENCE_S = 2.0
"""A peer has taken nothing of a full socket for so long."""
_FULL_BYTES = 2**16


class _Queue(NamedTuple):
    num_bytes: int
    since_s: float


class StuckConnections:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[OwnSocket, _Queue] = {}

    def forget(self) -> None:
        """Memory is not short: whoever takes nothing may have his reasons."""
        self._queues.clear()

    def cut(self) -> None:
        """Shut those that have been stuck since PATIENCE_S ago. To be called now and then."""
        now_s = self._clock()
        before, self._queues = self._queues, {}
        for own, num_bytes in _full_sockets():
            queue = before.get(own)
            if queue is None or queue.num_bytes != num_bytes:
                queue = _Queue(num_bytes, now_s)
            if now_s - queue.since_s < PATIENCE_S:
                self._queues[own] = queue
            else:
                _log.warning("cut a connection whose peer reads nothing", unread_bytes=num_bytes)
                shut(own)


def _full_sockets() -> Iterator[tuple[OwnSocket, int]]:
    """Sockets with many bytes that the peer has not taken, and how many."""
    for own in open_sockets(open_files()):
        try:
            # SIOCOUTQ of unix(7) and tcp(7) has the number of the terminals' call.
            (num_bytes,) = struct.unpack("i", fcntl.ioctl(own.fd, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # closed since, or a socket that listens
            continue
        if num_bytes >= _FULL_BYTES:
            yield own, num_bytes
