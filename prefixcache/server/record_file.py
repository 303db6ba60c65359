"""The file that a record of requests goes to: private, limited in size, one daemon's.

Owns opening, rotation and whole lines; knows neither threads nor what a line says.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from prefixcache.errors import InvalidArgumentError

_MODE = 0o600
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_PRESENT = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RecordFile:
    """A new file at `path`. What stood there before, unless it is empty, becomes `path.1`; so does
    the file itself before it is larger than half of `max_bytes`, which both together never exceed.

    Raises InvalidArgumentError if the path is not one of a regular file, cannot be written, or is
    the record of a daemon that runs. Not thread-safe.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_file_bytes = max_bytes // 2
        self._num_bytes = 0
        try:
            self._check_path()
            self._fd = self._open_new()
        except OSError as error:
            problem = f"cannot write {path}: {error.strerror}"
            raise InvalidArgumentError("record", problem) from error

    def append(self, line: bytes) -> bool:
        """Write a line, whole or not at all. False if it is larger than a file may be.

        Raises OSError; what was written of the line is taken back, as far as the disk allows.
        """
        if len(line) > self._max_file_bytes:
            return False
        if self._num_bytes + len(line) > self._max_file_bytes:
            full, self._fd, self._num_bytes = self._fd, self._open_new(), 0
            os.close(full)
        try:
            _write_all(self._fd, line)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes += len(line)
        return True

    def close(self) -> None:
        """The lock goes with it."""
        os.close(self._fd)

    def _check_path(self) -> None:
        """What stands there is a regular file that nobody writes."""
        try:
            fd = os.open(self._path, _PRESENT)
        except FileNotFoundError:
            return
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidArgumentError("record", f"{self._path} is no regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{self._path} is written by a running daemon"
            raise InvalidArgumentError("record", problem) from None
        finally:
            os.close(fd)

    def _open_new(self) -> int:
        with suppress(FileNotFoundError):
            # An empty one, of a start that failed perhaps, is not worth the record before it.
            if self._path.stat().st_size:
                self._path.rename(self._path.with_name(self._path.name + ".1"))
            else:
                self._path.unlink()
        fd = os.open(self._path, _NEW, _MODE)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd


def _write_all(fd: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]
