"""Who owns the path of a Unix socket.

gRPC binds over a socket file without asking, so a second daemon would take the first one's path
away. A lock file beside the socket names the owner: it is locked as long as the daemon lives, by
the kernel, so it is never stale, and a socket file without a locked owner may be replaced.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from prefixcache.errors import InvalidArgumentError

SOCKET_MODE = 0o660


class SocketClaim:
    """Holds `path` for this process until closed; use as a context manager.

    Raises InvalidArgumentError if a live daemon holds it (with its pid) or if something that is
    not a socket stands there; neither is touched. field: the setting that names the path.
    """

    def __init__(self, path: Path, field: str = "listen") -> None:
        self._path = path
        self._field = field
        lock_path = path.with_name(path.name + ".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._lock_fd = os.open(lock_path, flags, SOCKET_MODE)
        except OSError as error:
            raise InvalidArgumentError(self._field, f"cannot open {lock_path}: {error}") from error
        with ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            self._claim()
            undo.pop_all()

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._lock_fd, 32).decode(errors="replace").strip() or "unknown"
            raise InvalidArgumentError(
                self._field, f"{self._path} belongs to a running daemon, pid {pid}"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        if os.path.lexists(self._path):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise InvalidArgumentError(self._field, f"{self._path} exists and is no socket")
            self._path.unlink()

    def open_to_group(self) -> None:
        """Set the mode of the socket once it is bound."""
        os.chmod(self._path, SOCKET_MODE)

    def close(self) -> None:
        """Remove the socket and let go of the path.

        The lock file stays: whoever has just opened it would lock a file that is gone.
        """
        self._path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def __enter__(self) -> SocketClaim:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
