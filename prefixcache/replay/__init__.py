"""Replay of request traces against a cache: exact counts of hits and evictions.

A trace says which prompts share which prefixes, not what they say. `trace` reads it and makes
token ids with those equalities, `targets` are the caches it can run against (a pool in this
process, or a daemon), `run` is the loop and its counts. Everything is single-threaded.
"""

from __future__ import annotations

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
    "DaemonTarget",
    "InProcessTarget",
    "ReplayResult",
    "Target",
    "TargetStats",
    "Trace",
    "TraceRequest",
    "read_trace",
    "replay_trace",
]
