"""What the daemon tells Prometheus: names, help and values of all its metrics.

Counters are read when they are asked for, in one snapshot under the core's lock: serving does no
work for them but to count. Names and labels are a contract with dashboards and alert rules. Labels
hold what the daemon or its operator chose, never what a client sends, so they are bounded.

The only module that knows prometheus_client's metrics. Safe to use from many threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from prefixcache.core.block_ages import BlockAges
from prefixcache.core.events import EventLog, Reader
from prefixcache.core.histogram import Histogram
from prefixcache.core.stats import TenantStats
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.arenas import Arenas
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.daemon import Daemon
from prefixcache.server.recorder import Recorder
from prefixcache.types import PoolAccess

PREFIX = "prefixcache_"


@dataclass(frozen=True, slots=True)
class Value:
    """One sample of a metric: a count of `Sequences.counts`, and its label if it has one."""

    field: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric whose samples are counts of the core. label: name of their label, or empty."""

    name: str
    help: str
    values: tuple[Value, ...]
    label: str = ""


def _one(name: str, field: str, text: str) -> Family:
    return Family(name, text, (Value(field),))


COUNTERS = (
    _one("requests", "requests", "Sequences allocated, resumed ones left out."),
    _one("queries_tokens", "queries_tokens", "Prompt tokens of sequences that read the cache."),
    _one("hit_tokens", "hit_tokens", "Those of them that were cached."),
    _one(
        "queries_blocks",
        "queries_blocks",
        "Full blocks of prompts of sequences that read the cache.",
    ),
    _one(
        "hit_blocks",
        "hit_blocks",
        "Those of them that were cached; a full hit counts its last block.",
    ),
    _one(
        "resumed_requests", "resumed_requests", "Sequences allocated again after their preemption."
    ),
    _one(
        "resumed_queries_tokens",
        "resumed_queries_tokens",
        "Prompt tokens of resumed sequences that read the cache.",
    ),
    _one("resumed_hit_tokens", "resumed_hit_tokens", "Those of them that were cached."),
    _one("allocation_refused", "allocation_refused", "Allocate calls refused for lack of blocks."),
    _one("append_refused", "append_refused", "Rows of Append refused for lack of blocks."),
    Family(
        "prefill_tokens",
        "Prompt tokens whose K/V are there, by where they came from.",
        (Value("prefill_tokens_computed", "computed"), Value("prefill_tokens_cached", "cached")),
        "source",
    ),
    Family(
        "evictions",
        "Cached blocks that lost their hash, by why: room is for blocks that were needed.",
        (Value("evictions", "room"),),
        "reason",
    ),
    _one("resets", "resets", "Times that all hashes were dropped."),
    _one(
        "expired_sequences",
        "expired_sequences",
        "Sequences freed because their session ended unasked, or their owner was silent.",
    ),
    _one(
        "expired_sessions",
        "expired_sessions",
        "Sessions that ended without being closed.",
    ),
)
GAUGES = (
    Family(
        "blocks",
        "Blocks of the pool: held by a sequence or a call, kept until a writer has ended, free and "
        "findable, free and empty.",
        (
            Value("referenced", "referenced"),
            Value("quarantined", "quarantined"),
            Value("evictable", "evictable"),
            Value("blank", "blank"),
        ),
        "state",
    ),
    _one("cached_blocks", "cached", "Blocks that can be hit, referenced or evictable."),
    _one("block_size_tokens", "block_size", "Tokens of a block."),
    _one("sequences", "sequences", "Live sequences."),
    _one("owners", "owners", "Owners with live sequences, sessions among them."),
    _one("sessions", "sessions", "Open sessions."),
)


class DaemonCollector:
    """Reads one daemon at each scrape. call_counts: of its RPC server. recorder: if it has one."""

    def __init__(
        self, daemon: Daemon, call_counts: Mapping[str, CallCounts], recorder: Recorder | None
    ) -> None:
        self._daemon = daemon
        self._sequences = daemon.sequences
        self._arenas = daemon.arenas
        self._call_counts = call_counts
        self._recorder = recorder
        self._constant = tuple(_info_metrics(daemon.info))

    def collect(self) -> Iterator[Metric]:
        with self._sequences.lock:
            counts = self._sequences.counts()
            ages = self._sequences.pool.ages()
            tenants = self._sequences.tenants.stats()
            events = tuple(_event_metrics(self._sequences.pool.events))
        for family in COUNTERS:
            yield _filled(CounterMetricFamily(PREFIX + family.name, family.help), family, counts)
        for family in GAUGES:
            yield _filled(GaugeMetricFamily(PREFIX + family.name, family.help), family, counts)
        yield GaugeMetricFamily(
            PREFIX + "pool_usage_ratio",
            "Referenced blocks as a part of all blocks, 0 to 1.",
            counts["referenced"] / counts["num_blocks"],
        )
        yield from _arena_metrics(self._arenas)
        yield _attached_metric(self._daemon)
        yield from _age_metrics(ages)
        yield from _tenant_metrics(tenants)
        yield from events
        yield CounterMetricFamily(
            PREFIX + "record_missing_requests",
            "Requests that are not in the record, as the disk was too slow, or is full.",
            self._recorder.num_dropped if self._recorder is not None else 0,
        )
        yield from _call_metrics(self._call_counts)
        yield from self._constant


def make_registry(
    daemon: Daemon, call_counts: Mapping[str, CallCounts], recorder: Recorder | None = None
) -> CollectorRegistry:
    """The daemon's metrics, and those of its process and of Python's collector of garbage."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(DaemonCollector(daemon, call_counts, recorder))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def _filled(metric: Metric, family: Family, counts: Mapping[str, int]) -> Metric:
    name = metric.name + "_total" if metric.type == "counter" else metric.name
    for value in family.values:
        labels = {family.label: value.label} if family.label else {}
        metric.add_sample(name, labels, counts[value.field])
    return metric


def _attached_metric(daemon: Daemon) -> Metric:
    metric = GaugeMetricFamily(
        PREFIX + "attached",
        "Processes that have the pool's memory mapped, for reading or for writing.",
        labels=("access",),
    )
    for access in (PoolAccess.READ, PoolAccess.WRITE):
        metric.add_metric((access.name.lower(),), daemon.num_attached(access))
    return metric


def _arena_metrics(arenas: Arenas) -> Iterator[Metric]:
    yield GaugeMetricFamily(PREFIX + "arenas", "Arenas of clients.", len(arenas))
    yield GaugeMetricFamily(
        PREFIX + "arena_bytes", "Bytes of clients' arenas that are mapped.", arenas.num_bytes
    )


def _age_metrics(ages: BlockAges) -> Iterator[Metric]:
    for name, text, ages_of in (
        (
            "block_lifetime_seconds",
            "Age of blocks when they were evicted, since they became findable.",
            ages.lifetime,
        ),
        (
            "block_idle_before_evict_seconds",
            "Time from the last use of blocks until they were evicted.",
            ages.idle_before_evict,
        ),
        (
            "block_reuse_gap_seconds",
            "Time since the last use of blocks that were hit.",
            ages.reuse_gap,
        ),
        (
            "evict_to_reuse_seconds",
            "Time since the eviction of blocks that were asked for again.",
            ages.evict_to_reuse,
        ),
    ):
        yield HistogramMetricFamily(PREFIX + name, text, _buckets(ages_of), ages_of.sum)


def _tenant_metrics(tenants: Iterable[TenantStats]) -> Iterator[Metric]:
    """Of the tenants that the operator has named, none without access control."""
    labels = ("tenant", "namespace")
    blocks = GaugeMetricFamily(
        PREFIX + "tenant_blocks",
        "Blocks that a tenant holds, alone or with others, and of its own that can be evicted.",
        labels=(*labels, "state"),
    )
    quota = GaugeMetricFamily(
        PREFIX + "tenant_quota_blocks",
        "Blocks that a tenant can always have, and that it may hold at most.",
        labels=(*labels, "limit"),
    )
    evictions = CounterMetricFamily(
        PREFIX + "tenant_evictions", "Evictions of a tenant's blocks.", labels=labels
    )
    refused = CounterMetricFamily(
        PREFIX + "tenant_refused",
        "Calls and rows of a tenant refused for lack of blocks or over its quota.",
        labels=labels,
    )
    for tenant in tenants:
        name = tenant.name, tenant.namespace
        blocks.add_metric((*name, "held"), tenant.held)
        blocks.add_metric((*name, "evictable"), tenant.evictable)
        quota.add_metric((*name, "guaranteed"), tenant.guaranteed_blocks)
        if tenant.max_blocks is not None:
            quota.add_metric((*name, "max"), tenant.max_blocks)
        evictions.add_metric(name, tenant.evictions)
        refused.add_metric(name, tenant.refused)
    return iter((blocks, quota, evictions, refused))


def _event_metrics(log: EventLog | None) -> Iterator[Metric]:
    """Read under the core's lock."""
    yield CounterMetricFamily(
        PREFIX + "events",
        "Changes of the cache that readers of events are told.",
        log.next_number if log is not None else 0,
    )
    gaps = CounterMetricFamily(
        PREFIX + "event_gaps",
        "Times that a reader of events was too slow and missed some, by how it reads.",
        labels=("reader",),
    )
    for reader in Reader:
        gaps.add_metric((reader,), log.num_gaps[reader] if log is not None else 0)
    yield gaps


def _call_metrics(call_counts: Mapping[str, CallCounts]) -> Iterable[Metric]:
    ended = CounterMetricFamily(
        PREFIX + "rpc",
        "Calls by how they ended; on a stream, messages.",
        labels=("method", "code"),
    )
    durations = HistogramMetricFamily(
        PREFIX + "rpc_duration_seconds",
        "Time that calls were worked on, waiting for the core included.",
        labels=("method",),
    )
    for method, counts in sorted(call_counts.items()):
        totals = counts.read()
        for code, count in sorted(totals.by_code.items()):
            ended.add_metric((method, code), count)
        durations.add_metric((method,), _buckets(totals.durations), totals.durations.sum)
    return ended, durations


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound is None else str(bound), below))
    return buckets


def _info_metrics(info: cache_pb2.GetServerInfoResponse) -> Iterator[Metric]:
    yield InfoMetricFamily(
        PREFIX + "build",
        "The program that runs.",
        {"version": info.server_version, "api_version": info.api_version, "core": info.core},
    )
    yield InfoMetricFamily(
        PREFIX + "pool",
        "What the pool holds, and how it is found.",
        {
            "device": info.device,
            "block_size": str(info.block_size),
            "num_blocks": str(info.num_blocks),
            "hash_algorithm": info.hash_algorithm,
            "model_name": info.model_name,
            "model_revision": info.model_revision,
            "layout_fingerprint": info.layout_fingerprint.hex(),
        },
    )
