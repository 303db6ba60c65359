"""Ends what nobody asks for any more: expired sessions and owners, and streams of no use.

One thread, which looks often enough for a session to be gone within a second of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from prefixcache.core.sequences import Sequences

_log = structlog.get_logger(__name__)

_MAX_INTERVAL_S = 0.25
_SWEEPS_A_TTL = 10
_LATE_S = 1.0


class Sweeper:
    """cut_stale_streams: cancels the streams that have no use any more.

    lost_writers: names the processes for which blocks are kept in quarantine, for people.

    If a sweep comes late by a second or more, the whole process stood still, and its clients could
    not be heard: sessions get that time back.
    """

    def __init__(
        self,
        sequences: Sequences,
        owner_ttl_s: float,
        cut_stale_streams: Callable[[], None],
        *,
        lost_writers: Callable[[], list[str]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = min(owner_ttl_s / _SWEEPS_A_TTL, _MAX_INTERVAL_S)
        self._sequences = sequences
        self._cut_stale_streams = cut_stale_streams
        self._lost_writers = lost_writers
        self._clock = clock
        self._due_s = clock() + self.interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns once the last sweep is over."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def sweep(self) -> None:
        late_s = self._clock() - self._due_s
        with self._sequences.lock:
            if late_s >= _LATE_S:
                self._sequences.live.sessions.postpone(late_s)
            expired_sessions = self._sequences.counters.expired_sessions
            num_kept_before = self._sequences.pool.num_quarantined
            num_expired = self._sequences.expire()
            num_sessions = self._sequences.counters.expired_sessions - expired_sessions
            num_kept = self._sequences.pool.num_quarantined
        self._cut_stale_streams()
        self._due_s = self._clock() + self.interval_s
        if num_expired or num_sessions:
            _log.info(
                "freed what nobody holds any more", sequences=num_expired, sessions=num_sessions
            )
        if num_kept > num_kept_before:
            _log.warning(
                "blocks are kept until writers without a session have ended",
                blocks=num_kept,
                writers=self._lost_writers(),
            )

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.sweep()
