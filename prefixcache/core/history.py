"""Counters over time, for charts: what happened in each interval of the last minutes.

Moments are kept, as many as asked for, and intervals are made of neighbours when they are read. A
moment whose time or counts are below those of the one before it is of another life of the daemon,
and the history begins anew with it. Not thread-safe: who owns it has a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Moment:
    """Counters since the daemon's start, at `uptime_s`; `referenced` is a gauge."""

    uptime_s: float
    referenced: int
    queries_tokens: int
    hit_tokens: int
    evictions: int
    requests: int
    calls: int

    @classmethod
    def of(cls, uptime_s: float, counts: Mapping[str, int], num_calls: int) -> Moment:
        """counts: as `Sequences.counts` or the fields of PoolStats."""
        return cls(
            uptime_s,
            counts["referenced"],
            counts["queries_tokens"],
            counts["hit_tokens"],
            counts["evictions"],
            counts["requests"],
            num_calls,
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """From one moment to the next. Times are of the daemon's uptime, rates a second.

    referenced: blocks at its end. hit_rate: of the tokens that were asked for in it, 0 to 1; None
    if there were none.
    """

    start_s: float
    end_s: float
    referenced: int
    hit_rate: float | None
    evictions_per_s: float
    requests_per_s: float
    calls_per_s: float


class History:
    """num_intervals: the most that are kept, at least 1."""

    def __init__(self, num_intervals: int) -> None:
        self._moments: deque[Moment] = deque(maxlen=num_intervals + 1)

    def add(self, moment: Moment) -> None:
        """One of the same time as the last one takes its place."""
        last = self._moments[-1] if self._moments else moment
        if moment.uptime_s < last.uptime_s or moment.calls < last.calls:
            self._moments.clear()
        elif self._moments and moment.uptime_s == last.uptime_s:
            self._moments.pop()
        self._moments.append(moment)

    def intervals(self) -> tuple[Interval, ...]:
        """Oldest first."""
        return tuple(_between(before, after) for before, after in pairwise(self._moments))


def _between(before: Moment, after: Moment) -> Interval:
    seconds = after.uptime_s - before.uptime_s
    queried = after.queries_tokens - before.queries_tokens
    return Interval(
        start_s=before.uptime_s,
        end_s=after.uptime_s,
        referenced=after.referenced,
        hit_rate=(after.hit_tokens - before.hit_tokens) / queried if queried else None,
        evictions_per_s=(after.evictions - before.evictions) / seconds,
        requests_per_s=(after.requests - before.requests) / seconds,
        calls_per_s=(after.calls - before.calls) / seconds,
    )
