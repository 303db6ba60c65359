"""The service manager's end of the notify protocol."""

from __future__ import annotations

import socket
from types import TracebackType

from tests.support.waiting import WAIT_S


class NotifySocket:
    """name: what NOTIFY_SOCKET holds, a path or, with @, an abstract one. A context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(WAIT_S)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)

    def __enter__(self) -> NotifySocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def receive(self) -> dict[str, str]:
        """The assignments of the next message."""
        lines = self._socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def receive_until(self, key: str) -> tuple[int, dict[str, str]]:
        """The next message that assigns `key`, and how many beats came before it."""
        num_beats = 0
        while key not in (message := self.receive()):
            assert message == {"WATCHDOG": "1"}
            num_beats += 1
        return num_beats, message
