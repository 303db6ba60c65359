"""What a daemon counts, in one snapshot: of the pool, of its calls, and for how long it has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prefixcache.core.stats import CallStats, PoolStats
from prefixcache.server.call_counts import OK, CallCounts
from prefixcache.server.daemon import Daemon
from prefixcache.types import PoolAccess


def read_stats(daemon: Daemon, call_counts: Mapping[str, CallCounts]) -> PoolStats:
    """Takes the core's lock. call_counts: by the RPC's name."""
    with daemon.sequences.lock:
        stats = daemon.sequences.stats()
    return replace(
        stats,
        uptime_s=daemon.uptime_s(),
        arenas=len(daemon.arenas),
        arena_bytes=daemon.arenas.num_bytes,
        calls=read_calls(call_counts),
        attached_readers=daemon.num_attached(PoolAccess.READ),
        attached_writers=daemon.num_attached(PoolAccess.WRITE),
    )


def read_calls(call_counts: Mapping[str, CallCounts]) -> tuple[CallStats, ...]:
    """Of the RPCs that were called, by name."""
    found = []
    for method, counts in sorted(call_counts.items()):
        totals = counts.read()
        ended = totals.durations.count
        if ended:
            failed = ended - totals.by_code[OK]
            found.append(CallStats(method, ended, failed, totals.durations.sum))
    return tuple(found)
