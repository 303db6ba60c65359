"""What an operator sees of a daemon at one moment, and how its counters went in the last minutes.

The numbers are those of GetStats. Clients and sessions are known by digests: nothing that a client
sends is shown, as in the metrics. The history is kept here, so that a page that is opened after an
incident shows it: `NUM_INTERVALS` moments, however long the daemon runs.

Safe to use from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixcache.core.history import History, Interval, Moment
from prefixcache.core.sessions import owner_digest
from prefixcache.core.stats import PoolStats
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.daemon import Daemon
from prefixcache.server.read_stats import read_calls, read_stats
from prefixcache.types import SequenceOrder

INTERVAL_S = 5.0
NUM_INTERVALS = 120
MAX_AGE_S = 1.0
"""An overview may be so old: it takes a walk over all sequences, and anyone may ask for it."""
MAX_SEQUENCES = 10
MAX_SESSIONS = 20


@dataclass(frozen=True, slots=True)
class SequenceRow:
    owner_digest: str
    tenant: str
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class SessionRow:
    digest: str
    tenant: str
    num_sequences: int
    is_connected: bool
    left_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    """sequences: those with the most blocks. sessions: the oldest. history: oldest first."""

    is_serving: bool
    info: cache_pb2.GetServerInfoResponse
    stats: PoolStats
    sequences: tuple[SequenceRow, ...]
    sessions: tuple[SessionRow, ...]
    history: tuple[Interval, ...]


class Observer:
    """call_counts: by the RPC's name. is_serving: whether calls are served now."""

    def __init__(
        self, daemon: Daemon, call_counts: Mapping[str, CallCounts], is_serving: Callable[[], bool]
    ) -> None:
        self._daemon = daemon
        self._call_counts = call_counts
        self._is_serving = is_serving
        self._history = History(NUM_INTERVALS)
        self._due_s = 0.0
        self._overview: Overview | None = None
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Keep the counters, if that is due. To be called more often than `INTERVAL_S`."""
        uptime_s = self._daemon.uptime_s()
        if uptime_s < self._due_s:
            return
        self._due_s = uptime_s + INTERVAL_S
        with self._daemon.sequences.lock:
            counts = self._daemon.sequences.counts()
        num_calls = sum(call.ended for call in read_calls(self._call_counts))
        with self._lock:
            self._history.add(Moment.of(uptime_s, counts, num_calls))

    def overview(self) -> Overview:
        """At most `MAX_AGE_S` old."""
        with self._lock:
            last = self._overview
            if last is None or self._daemon.uptime_s() - last.stats.uptime_s >= MAX_AGE_S:
                last = self._overview = self._look()
            return last

    def _look(self) -> Overview:
        return Overview(
            is_serving=self._is_serving(),
            info=self._daemon.info,
            stats=read_stats(self._daemon, self._call_counts),
            sequences=self._largest_sequences(),
            sessions=self._oldest_sessions(),
            history=self._history.intervals(),
        )

    def _largest_sequences(self) -> tuple[SequenceRow, ...]:
        sequences = self._daemon.sequences
        with sequences.lock:
            found = sequences.listings.first_sequences(SequenceOrder.MOST_BLOCKS, MAX_SEQUENCES)
            return tuple(
                SequenceRow(
                    owner_digest=owner_digest(info.owner),
                    tenant=sequences.tenants.name_of(info.account),
                    num_tokens=info.num_tokens,
                    num_computed_tokens=info.num_computed_tokens,
                    num_cached_tokens=info.num_cached_tokens,
                    num_blocks=info.num_blocks,
                    age_s=info.age_s,
                )
                for info in found
            )

    def _oldest_sessions(self) -> tuple[SessionRow, ...]:
        sequences = self._daemon.sequences
        with sequences.lock:
            found = sequences.listings.sessions_after(0, MAX_SESSIONS)
        return tuple(
            SessionRow(
                digest=info.digest,
                tenant=info.tenant,
                num_sequences=info.num_sequences,
                is_connected=info.is_connected,
                left_s=info.left_s,
                age_s=info.age_s,
            )
            for info in found
        )
