"""What the service manager is told: systemd's notify protocol (sd_notify(3)), without its library.

Messages go as datagrams to the socket that NOTIFY_SOCKET names; without one nothing is sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from prefixcache.errors import InvalidArgumentError

_USEC = 1_000_000
_EXTRA_STOP_S = 10.0
"""What ending takes beside the drain."""
_SEND_TIMEOUT_S = 5.0
"""For room in the manager's queue."""


class ServiceManager:
    """watchdog_s: a beat is expected more often than this; None for none."""

    def __init__(self, socket_name: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = _address_of(socket_name) if socket_name else None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ServiceManager:
        """Raises InvalidArgumentError for values that the protocol does not know."""
        socket_name = environ.get("NOTIFY_SOCKET") or None
        pid = environ.get("WATCHDOG_PID", str(os.getpid()))
        if pid != str(os.getpid()):
            return cls(socket_name)
        return cls(socket_name, _watchdog_s(environ.get("WATCHDOG_USEC", "")))

    def ready(self, status: str) -> None:
        """status: one line for people. Also after a reload."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={usec}", "STATUS=reloading")

    def stopping(self, drain_timeout_s: float) -> None:
        """The end may take as long as running calls may."""
        usec = int((drain_timeout_s + _EXTRA_STOP_S) * _USEC)
        lines = ["STOPPING=1", "STATUS=waiting for running calls", f"EXTEND_TIMEOUT_USEC={usec}"]
        if self.watchdog_s is not None:
            # Nobody beats while the calls end.
            lines.append(f"WATCHDOG_USEC={usec}")
        self._send(*lines)

    def beat(self) -> None:
        """Left out if the manager is slow to read: it has beats to read."""
        self._send("WATCHDOG=1", timeout_s=0.0)

    def _send(self, *lines: str, timeout_s: float = _SEND_TIMEOUT_S) -> None:
        if self._address is None:
            return
        # A manager that has gone is no reason to stop serving.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # Only a connected socket waits for room at its peer, which is 10 messages by default.
            sender.connect(self._address)
            sender.settimeout(timeout_s)
            sender.send("\n".join(lines).encode())


def _address_of(name: str) -> str:
    """Of a path, or of an abstract socket, whose name begins with @."""
    if not name.startswith(("/", "@")):
        raise InvalidArgumentError("NOTIFY_SOCKET", f"{name!r} is neither a path nor abstract")
    return "\0" + name[1:] if name.startswith("@") else name


def _watchdog_s(text: str) -> float | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InvalidArgumentError("WATCHDOG_USEC", f"{text!r} is no number of microseconds")
    return int(text) / _USEC
