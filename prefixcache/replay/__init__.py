"""Replay of request traces against a cache: exact counts of hits and evictions.

A trace says which prompts share which prefixes, not what they say. `trace` reads it and makes
token ids with those equalities, `targets` are the caches it can run against (a pool in this
process, or a daemon), `run` is the loop and its counts. `reuse` finds the hits of all pool sizes in
one walk, without a cache; `curve`, `working_set` and `analysis` say what follows for the size of a
pool. Everything is single-threaded.
"""

from __future__ import annotations

from prefixcache.replay.analysis import Analysis, analyze_trace
from prefixcache.replay.curve import HitCurve, PoolCounts
from prefixcache.replay.reuse import Reuse, find_reuse
from prefixcache.replay.run import ReplayResult, replay_trace
from prefixcache.replay.targets import (
    Admission,
    DaemonTarget,
    InProcessTarget,
    Target,
    TargetStats,
)
from prefixcache.replay.trace import Trace, TraceRequest, read_trace

__all__ = [
    "Admission",
    "Analysis",
    "DaemonTarget",
    "HitCurve",
    "InProcessTarget",
    "PoolCounts",
    "ReplayResult",
    "Reuse",
    "Target",
    "TargetStats",
    "Trace",
    "TraceRequest",
    "analyze_trace",
    "find_reuse",
    "read_trace",
    "replay_trace",
]
