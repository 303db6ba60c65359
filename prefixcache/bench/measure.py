"""Interleaved rounds: everything that is compared runs once in each round, in rotating order.

So a machine that gets slower, or has other work for a while, slows all of them alike. Python's
cyclic collector runs between rounds and never inside a measured call. The first round warms up
and is thrown away. Not thread-safe.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ResultT = TypeVar("ResultT")

Clock = Callable[[], float]
Candidate = Callable[[], None]
"""One round of one thing that is measured: it records its laps itself."""
Progress = Callable[[str, float], None]
"""Told the step and what part of it is done, 0 to 1."""
OnRound = Callable[[float], None]
"""Told, after each round, what part of all rounds is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What was seen of one quantity, in the unit of its samples."""

    median: float
    min: float
    max: float
    p99: float
    count: int


def summarize(samples: Iterable[float]) -> Summary:
    """Raises ValueError without samples."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples")
    return Summary(
        median=quantile(ordered, 0.5),
        min=ordered[0],
        max=ordered[-1],
        p99=quantile(ordered, 0.99),
        count=len(ordered),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of ascending samples lie, between neighbours by proportion."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Laps(Generic[KeyT]):
    """Samples by key, mostly seconds of calls. `clock`: seconds, ever rising."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._samples: dict[KeyT, list[float]] = {}

    def time(self, key: KeyT, call: Callable[[], ResultT]) -> ResultT:
        """Call once and keep how long it took."""
        return self.time_each(key, 1, call)

    def time_each(self, key: KeyT, count: int, call: Callable[[], ResultT]) -> ResultT:
        """Call once, which does `count` equal things, and keep how long one took."""
        start = self._clock()
        result = call()
        self.add(key, (self._clock() - start) / count)
        return result

    def add(self, key: KeyT, sample: float) -> None:
        self._samples.setdefault(key, []).append(sample)

    def add_sum(self, key: KeyT, *parts: KeyT) -> None:
        """Keep what the last laps of several calls took together."""
        self.add(key, sum(self._samples[part][-1] for part in parts))

    def add_all(self, other: Laps[KeyT]) -> None:
        for key in other:
            self._samples.setdefault(key, []).extend(other.samples(key))

    def now(self) -> float:
        return self._clock()

    def clear(self) -> None:
        self._samples.clear()

    def __iter__(self) -> Iterator[KeyT]:
        """Keys in the order in which they were first seen."""
        return iter(self._samples)

    def samples(self, key: KeyT) -> list[float]:
        return self._samples[key]

    def summary(self, key: KeyT) -> Summary:
        return summarize(self._samples[key])

    def __contains__(self, key: KeyT) -> bool:
        return key in self._samples


@dataclass(frozen=True, slots=True)
class Rounds:
    """How many rounds: at least `fewest`, then more until `budget_s` is spent, at most `most`."""

    fewest: int
    most: int
    budget_s: float

    @classmethod
    def exactly(cls, count: int) -> Rounds:
        return cls(count, count, math.inf)


def run_rounds(
    candidates: Sequence[Candidate],
    rounds: Rounds,
    *,
    warmed_up: Callable[[], None],
    on_round: OnRound,
    clock: Clock = time.perf_counter,
) -> int:
    """Run each candidate once a round, each round beginning with another one.

    warmed_up: called after the first round, which is not counted; it throws the samples away.
    Returns the number of rounds.
    """
    with _collector_between_rounds() as collect:
        for candidate in candidates:
            candidate()
        warmed_up()
        start = clock()
        done = 0
        while True:
            collect()
            first = done % max(1, len(candidates))
            for candidate in (*candidates[first:], *candidates[:first]):
                candidate()
            done += 1
            spent = (clock() - start) / rounds.budget_s
            on_round(min(1.0, max(done / rounds.most, min(spent, done / rounds.fewest))))
            if done >= rounds.most or (done >= rounds.fewest and spent >= 1):
                return done


@contextmanager
def _collector_between_rounds() -> Iterator[Callable[[], object]]:
    """Yields what collects, which leaves alone all that there was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
