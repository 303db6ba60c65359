"""Counts of durations in fixed buckets: what is observed while serving, and what is read of it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """A snapshot. `counts[i]` values are at most `bounds[i]` and above the bound before it.

    The last of the counts, one more than there are bounds, is of values above all of them.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Observations:
    """A histogram that grows. Not thread-safe: who owns it has a lock."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)
