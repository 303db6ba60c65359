"""Beats for the service manager as long as the daemon really works.

A mere timer would beat in a daemon that answers nobody. Each beat here is preceded by a proof: what
`works_within` asks for. Owns one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)


class Watchdog:
    """timeout_s: of the service manager; None if it has no watchdog: then nothing is done.

    works_within: whether the daemon works, found out in so many seconds.

    beat: called after each proof, twice in `timeout_s` if the proofs are fast.
    """

    def __init__(
        self,
        timeout_s: float | None,
        works_within: Callable[[float], bool],
        beat: Callable[[], None],
    ) -> None:
        self._interval_s = timeout_s / 2 if timeout_s is not None else None
        self._works_within = works_within
        self._beat = beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._interval_s is not None:
            self._thread.start()

    def stop(self) -> None:
        """Does not wait: a proof may hang."""
        self._stop.set()

    def _run(self) -> None:
        assert self._interval_s is not None
        while not self._stop.is_set():
            if self._works_within(self._interval_s):
                self._beat()
            else:
                _log.error("no watchdog beat: the daemon does not work", within_s=self._interval_s)
            self._stop.wait(self._interval_s)
