"""Files in memory that this process has open, by name: other tests' threads may open others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_files(name: str) -> set[int]:
    """Inodes of those with `name` in theirs."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if name in os.readlink(fd):
                found.add(fd.stat().st_ino)
    return found
