"""A daemon's metrics as numbers, by name and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.rpc._pb import admin_pb2
from prefixcache.server.metrics import make_registry
from tests.support.daemon import RunningDaemon

Labels = Mapping[str, str]
Key = str | tuple[str, Labels]


class Scrape:
    """Samples of one scrape; `scrape[name]` of one without labels, else `scrape[name, labels]`."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for sample in samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in self._values, f"{key} is there twice"
            self._values[key] = sample.value

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: Key) -> float:
        return self._values[_key(key)]

    def __contains__(self, key: Key) -> bool:
        return _key(key) in self._values

    def names(self) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        """Of all samples, with their labels."""
        return set(self._values)

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for key, value in self._values.items() if key[0] == name)

    def labels(self, name: str) -> dict[str, str]:
        """Of the one sample of that name."""
        (labels,) = (key[1] for key in self._values if key[0] == name)
        return dict(labels)

    def buckets(self, name: str, labels: Labels) -> list[tuple[float, float]]:
        """Upper bounds and cumulative counts of one histogram, in their order."""
        found = []
        for (sample, pairs), value in self._values.items():
            own = dict(pairs)
            if sample == f"{name}_bucket" and labels.items() <= own.items():
                found.append((float(own["le"]), value))
        return found


def _key(key: Key) -> tuple[str, frozenset[tuple[str, str]]]:
    name, labels = (key, {}) if isinstance(key, str) else key
    return name, frozenset(labels.items())


def read_scrape(text: str) -> Scrape:
    """Of Prometheus text."""
    families = text_string_to_metric_families(text)
    return Scrape(sample for family in families for sample in family.samples)


def scrape(running: RunningDaemon) -> Scrape:
    registry = make_registry(running.daemon, running.server.call_counts)
    return read_scrape(generate_latest(registry).decode())


def assert_agreement(found: Scrape, stats: admin_pb2.GetStatsResponse) -> None:
    """Every number that both have."""
    for name in (
        "requests",
        "queries_tokens",
        "hit_tokens",
        "queries_blocks",
        "hit_blocks",
        "resumed_requests",
        "resumed_queries_tokens",
        "resumed_hit_tokens",
        "allocation_refused",
        "append_refused",
        "resets",
        "expired_sequences",
        "expired_sessions",
    ):
        assert found[f"prefixcache_{name}_total"] == getattr(stats, name), name
    assert found.total("prefixcache_evictions_total") == stats.evictions
    for state in ("referenced", "quarantined", "evictable", "blank"):
        assert found["prefixcache_blocks", {"state": state}] == getattr(stats, state)
    for source in ("computed", "cached"):
        labels = {"source": source}
        expected = getattr(stats, f"prefill_tokens_{source}")
        assert found["prefixcache_prefill_tokens_total", labels] == expected
    assert found.total("prefixcache_blocks") == stats.num_blocks
    assert found["prefixcache_pool_usage_ratio"] == stats.referenced / stats.num_blocks
    assert found["prefixcache_cached_blocks"] == stats.cached
    for calls in stats.calls:
        labels = {"method": calls.method}
        assert found["prefixcache_rpc_duration_seconds_count", labels] == calls.ended
        num_ok = found["prefixcache_rpc_total", {**labels, "code": "OK"}]
        assert num_ok == calls.ended - calls.failed
        assert found["prefixcache_rpc_duration_seconds_sum", labels] == calls.duration_s
    for ages in ("block_lifetime", "block_idle_before_evict"):
        assert found[f"prefixcache_{ages}_seconds_count"] == stats.evictions
    for name in ("sequences", "owners", "sessions"):
        assert found[f"prefixcache_{name}"] == getattr(stats, name)
