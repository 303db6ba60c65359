"""Buckets hold what is at most their bound, as Prometheus's `le` says."""

from __future__ import annotations

from prefixcache.core.histogram import Histogram, Observations


def test_nothing_observed_is_all_zeros() -> None:
    assert Observations((1.0, 2.0)).read() == Histogram((1.0, 2.0), (0, 0, 0), 0.0)


def test_a_value_counts_in_the_first_bucket_that_it_is_not_above() -> None:
    observed = Observations((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        observed.add(value)
    read = observed.read()
    assert read == Histogram((1.0, 2.0), (2, 2, 2), 107.0)
    assert read.count == 6


def test_a_snapshot_does_not_grow() -> None:
    observed = Observations(())
    before = observed.read()
    observed.add(3.0)
    assert (before.counts, observed.read().counts) == ((0,), (1,))
