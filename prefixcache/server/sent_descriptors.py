"""Descriptors that peers have sent: closed without a wait for what is behind them.

close(2) asks some file systems first (flush), and may wait for a peer's own process (FUSE) or for a
network; closing a socket may wait for a reader (SO_LINGER), and one that has descriptors in its
queue may wait for theirs. It may also fail. What is asked for is shared memory, and that is closed
at once: F_GET_SEALS says that it is some, without asking anybody. The rest is left to a thread,
which is the only one to wait then. Thread-safe.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from queue import SimpleQueue

_NO_LINGER = struct.pack("ii", 0, 0)


class SentDescriptors:
    """Those that are to be closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unclosed: Counter[int] = Counter()
        self._queue: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def num_unclosed(self, uid: int) -> int:
        """Of what a user's processes have sent."""
        with self._lock:
            return self._unclosed[uid]

    def close(self, descriptors: list[int], uid: int) -> None:
        """Empty the list. uid: of the process that has sent them."""
        while descriptors:
            fd = descriptors.pop()
            if _is_shared_memory(fd):
                os.close(fd)
            else:
                self._leave(fd, uid)

    def end(self) -> None:
        """The thread ends once it has closed what there is, for which nobody waits."""
        if self._thread is not None:
            self._queue.put(None)

    def _leave(self, fd: int, uid: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="peer-closing", daemon=True)
            self._thread.start()
        with self._lock:
            self._unclosed[uid] += 1
        self._queue.put((fd, uid))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            fd, uid = item
            _close(fd)
            with self._lock:
                self._unclosed[uid] -= 1
                if not self._unclosed[uid]:
                    del self._unclosed[uid]


def _is_shared_memory(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _close(fd: int) -> None:
    with suppress(OSError):  # it is no socket, or one that does not linger
        sent = socket.socket(fileno=fd)
        try:
            sent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        finally:
            sent.detach()
    with suppress(OSError):  # the descriptor is free even if its file system has failed
        os.close(fd)
