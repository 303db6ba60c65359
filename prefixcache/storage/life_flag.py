"""One byte in shared memory that says whether something still lives, to be read by others at once.

A daemon has one for each attachment: a client looks there after each use of the pool's memory, at
the cost of a load. Whoever clears it does so before it gives away what the flag stands for, so a
flag that is set after a computation says that nothing had been given away before it ended.
"""

from __future__ import annotations

import mmap
import os

from prefixcache.storage.shared_memory import (
    create_shared_memory,
    map_shared_memory,
    open_for_reading,
)


class LifeFlag:
    """A new flag, set. `clear` may be called from any thread. Raises OSError."""

    def __init__(self) -> None:
        fd = create_shared_memory("prefixcache-life", mmap.PAGESIZE)
        try:
            self._page = map_shared_memory(fd, mmap.PAGESIZE, writable=True)
            self._page[0] = 1
            self.fd: int | None = open_for_reading(fd)
        finally:
            os.close(fd)

    def clear(self) -> None:
        """For good."""
        self._page[0] = 0

    def close_fd(self) -> None:
        """Whoever is to read the flag has the descriptor `fd` now."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class LifeReader:
    """The flag behind a descriptor, which stays the caller's to close. Raises OSError."""

    def __init__(self, fd: int) -> None:
        self._page = map_shared_memory(fd, mmap.PAGESIZE, writable=False)

    @property
    def is_set(self) -> bool:
        return self._page[0] == 1
