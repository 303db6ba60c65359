"""Rounds are interleaved, samples are counted once, and medians are medians."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from functools import partial

import pytest

from prefixcache.bench.measure import Laps, Rounds, quantile, run_rounds, summarize


class FakeClock:
    """Stands still but for what `spend` adds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_lap_is_what_the_call_took_and_its_result_comes_back(clock: FakeClock) -> None:
    laps: Laps[str] = Laps(clock)
    for seconds in (5.0, 1.0, 2.0):
        assert laps.time("call", lambda seconds=seconds: clock.spend(seconds) or seconds) == seconds
        clock.spend(77.0)  # between calls
    summary = laps.summary("call")
    assert (summary.median, summary.min, summary.max, summary.count) == (2.0, 1.0, 5.0, 3)


def test_a_lap_of_many_is_what_one_took(clock: FakeClock) -> None:
    laps: Laps[str] = Laps(clock)
    laps.time_each("call", 4, partial(clock.spend, 2.0))
    assert laps.samples("call") == [0.5]


@pytest.mark.parametrize(
    ("samples", "median", "p99"),
    [
        ([3.0], 3.0, 3.0),
        ([1.0, 2.0], 1.5, 1.99),
        ([float(n) for n in range(101)], 50.0, 99.0),
    ],
)
def test_quantiles_lie_between_neighbours(samples: list[float], median: float, p99: float) -> None:
    summary = summarize(reversed(samples))
    assert summary.median == pytest.approx(median)
    assert summary.p99 == pytest.approx(p99)
    assert quantile(samples, 0.0) == samples[0]
    assert quantile(samples, 1.0) == samples[-1]


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_each_round_runs_all_candidates_and_begins_with_another(clock: FakeClock) -> None:
    ran: list[str] = []
    candidates = [partial(ran.append, name) for name in "abc"]
    done = run_rounds(
        candidates, Rounds.exactly(4), warmed_up=ran.clear, on_round=lambda _: None, clock=clock
    )
    assert done == 4
    assert "".join(ran) == "abc" + "bca" + "cab" + "abc"


def test_the_first_round_warms_up_and_does_not_count(clock: FakeClock) -> None:
    laps: Laps[str] = Laps(clock)
    costs: Iterator[float] = iter([50.0, 1.0, 2.0, 3.0])

    def candidate() -> None:
        laps.time("call", lambda: clock.spend(next(costs)))

    run_rounds(
        [candidate], Rounds.exactly(3), warmed_up=laps.clear, on_round=lambda _: None, clock=clock
    )
    assert laps.samples("call") == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("rounds", "cost", "expected"),
    [
        (Rounds(2, 10, 30.0), 1.0, 10),  # all there is time for
        (Rounds(2, 10, 30.0), 10.0, 3),  # until the budget is spent
        (Rounds(2, 10, 30.0), 100.0, 2),  # but never fewer
        (Rounds.exactly(5), 1000.0, 5),
    ],
)
def test_rounds_go_on_until_the_budget_is_spent(
    clock: FakeClock, rounds: Rounds, cost: float, expected: int
) -> None:
    told: list[float] = []
    done = run_rounds(
        [partial(clock.spend, cost)],
        rounds,
        warmed_up=lambda: None,
        on_round=told.append,
        clock=clock,
    )
    assert done == expected
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_the_collector_rests_while_candidates_run_and_is_on_again_afterwards() -> None:
    seen: list[bool] = []
    for was_enabled in (True, False):
        if not was_enabled:
            gc.disable()
        try:
            run_rounds(
                [lambda: seen.append(gc.isenabled())],
                Rounds(1, 1, math.inf),
                warmed_up=lambda: None,
                on_round=lambda _: None,
            )
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()
    assert seen == [False] * 4
