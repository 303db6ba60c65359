"""How many calls of each RPC ended how, and how long they took in the daemon.

A call counts once its request is there. Its time is that of its handler: parsing, hashing, waiting
for the core's lock and the work itself; the network, the wait for a thread and the sending of the
reply are no part of it. On a stream each message is a call. A call that is refused before its
request is looked at, as one whose deadline has passed, takes no time.

Safe to use from many threads. The lock of an RPC is held for a fraction of a microsecond.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from prefixcache.core.histogram import Histogram, Observations

DURATION_BOUNDS_S = (
    *(0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5),
    *(0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
OK = "OK"
INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class CallTotals:
    """A snapshot of one RPC's counts. by_code: names of gRPC's status codes, as far as they came.

    OK and INTERNAL are always there: an alert sees no first error of a series that begins with it.
    """

    durations: Histogram
    by_code: Mapping[str, int]


class CallCounts:
    """Of one RPC, since the daemon's start."""

    __slots__ = ("_durations", "_failed", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations = Observations(DURATION_BOUNDS_S)
        self._failed: dict[str, int] = {}

    def add(self, duration_s: float, code: str = OK) -> None:
        """A call has ended. code: name of its gRPC status code."""
        with self._lock:
            self._durations.add(duration_s)
            if code != OK:
                self._failed[code] = self._failed.get(code, 0) + 1

    def read(self) -> CallTotals:
        with self._lock:
            durations, failed = self._durations.read(), dict(self._failed)
        num_ok = durations.count - sum(failed.values())
        return CallTotals(durations, {OK: num_ok, INTERNAL: 0, **failed})
