"""Counters over time: what intervals say, how many there are, and restarts."""

from __future__ import annotations

import pytest

from prefixcache.core.history import History, Interval, Moment


def moment(uptime_s: float, *, queries: int = 0, hits: int = 0, calls: int = 0) -> Moment:
    return Moment(
        uptime_s=uptime_s,
        referenced=int(uptime_s),
        queries_tokens=queries,
        hit_tokens=hits,
        evictions=3 * queries,
        requests=queries // 10,
        calls=calls,
    )


def test_there_is_no_interval_before_the_second_moment() -> None:
    history = History(4)
    assert history.intervals() == ()
    history.add(moment(1.0))
    assert history.intervals() == ()


def test_an_interval_has_the_rates_of_its_own_time() -> None:
    history = History(4)
    history.add(moment(10.0, queries=100, hits=90, calls=7))
    history.add(moment(14.0, queries=180, hits=110, calls=9))
    assert history.intervals() == (
        Interval(
            start_s=10.0,
            end_s=14.0,
            referenced=14,
            hit_rate=0.25,
            evictions_per_s=60.0,
            requests_per_s=2.0,
            calls_per_s=0.5,
        ),
    )


def test_without_queries_there_is_no_hit_rate() -> None:
    history = History(4)
    history.add(moment(1.0, queries=5, hits=5))
    history.add(moment(2.0, queries=5, hits=5, calls=1))
    (interval,) = history.intervals()
    assert interval.hit_rate is None


@pytest.mark.parametrize("most", [1, 2, 7])
def test_the_oldest_intervals_go_first(most: int) -> None:
    history = History(most)
    for number in range(20):
        history.add(moment(float(number)))
    ends = [interval.end_s for interval in history.intervals()]
    assert ends == [float(number) for number in range(20 - most, 20)]


@pytest.mark.parametrize(("uptime_s", "calls"), [(1.0, 100), (60.0, 3)])
def test_a_restart_begins_the_history_anew(uptime_s: float, calls: int) -> None:
    history = History(4)
    history.add(moment(50.0, calls=50))
    history.add(moment(51.0, calls=60))
    history.add(moment(uptime_s, calls=calls))
    assert history.intervals() == ()
    history.add(moment(uptime_s + 1, calls=calls + 5))
    (interval,) = history.intervals()
    assert interval.calls_per_s == 5.0


def test_a_second_look_at_one_time_takes_the_place_of_the_first() -> None:
    history = History(4)
    history.add(moment(1.0, calls=1))
    history.add(moment(2.0, calls=2))
    history.add(moment(2.0, calls=4))
    (interval,) = history.intervals()
    assert interval.calls_per_s == 3.0
