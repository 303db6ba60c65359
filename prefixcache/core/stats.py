"""Counters of the core, and the snapshot that GetStats answers with.

Owns plain integers only; Prometheus and the RPCs read them. Guarded by the core's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixcache.core.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """Totals since start. A hit counts once a sequence, at Allocate, when that succeeds.

    Sequences that do not read the cache are no queries. Those marked as resumed (preempted and
    allocated again) count apart, so that preemption does not raise the hit rate.
    """

    requests: int = 0
    queries_tokens: int = 0
    hit_tokens: int = 0
    queries_blocks: int = 0
    hit_blocks: int = 0
    resumed_requests: int = 0
    resumed_queries_tokens: int = 0
    resumed_hit_tokens: int = 0
    allocation_refused: int = 0
    append_refused: int = 0
    resets: int = 0
    expired_sequences: int = 0
    expired_sessions: int = 0
    prefill_tokens_computed: int = 0
    """Prompt tokens that all layers have computed, each position once; hits are no part of it."""
    prefill_tokens_cached: int = 0

    def count_allocation(
        self, sequence: Sequence, block_size: int, *, reads: bool, resumed: bool
    ) -> None:
        """A new sequence was allocated. reads: its prompt was looked for in the cache."""
        num_tokens = sequence.num_tokens
        if resumed:
            self.resumed_requests += 1
            if reads:
                self.resumed_queries_tokens += num_tokens
                self.resumed_hit_tokens += sequence.num_cached_tokens
        else:
            self.requests += 1
            if reads:
                self.queries_tokens += num_tokens
                self.hit_tokens += sequence.num_cached_tokens
                self.queries_blocks += num_tokens // block_size
                self.hit_blocks += sequence.num_cached_blocks
        self.prefill_tokens_cached += sequence.num_cached_tokens


@dataclass(frozen=True, slots=True)
class TenantStats:
    """A tenant as it stands, in blocks; `prefixcache.core.accounts` says what they mean.

    max_blocks: None for no limit. evictions: of blocks charged to it, since start. refused: its
    allocations and rows of Append that found no room or were over its quota, since start.
    """

    name: str
    namespace: str
    guaranteed_blocks: int
    max_blocks: int | None
    held: int
    evictable: int
    evictions: int
    refused: int


@dataclass(frozen=True, slots=True)
class CallStats:
    """What became of the calls of one RPC since start; on a stream, each message is a call.

    ended, failed: calls, and those of them with a status other than OK. duration_s: the time that
    they were worked on, together, without network and queues.
    """

    method: str
    ended: int
    failed: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One consistent snapshot: counters since start and gauges of now.

    referenced + quarantined + evictable + blank = num_blocks, each >= 0. `slots_written` counts the
    token slots of referenced blocks whose K/V are complete, `num_blocks * block_size` at most.
    `tenants`: those of the auth file, and those that were; none without access control. `calls`:
    RPCs that were called. The daemon, not the core, fills them in, and `uptime_s`, and how many
    processes are attached to its memory, to read and to write, and clients' arenas with the bytes
    of them that are mapped. Two snapshots are equal if the pool is: none of that is a part of it.
    """

    num_blocks: int
    block_size: int
    referenced: int
    quarantined: int
    evictable: int
    blank: int
    cached: int
    sequences: int
    owners: int
    sessions: int
    slots_written: int
    evictions: int
    requests: int
    queries_tokens: int
    hit_tokens: int
    queries_blocks: int
    hit_blocks: int
    resumed_requests: int
    resumed_queries_tokens: int
    resumed_hit_tokens: int
    allocation_refused: int
    append_refused: int
    resets: int
    expired_sequences: int
    expired_sessions: int
    prefill_tokens_computed: int
    prefill_tokens_cached: int
    tenants: tuple[TenantStats, ...] = ()
    uptime_s: float = field(default=0.0, compare=False)
    arenas: int = field(default=0, compare=False)
    arena_bytes: int = field(default=0, compare=False)
    calls: tuple[CallStats, ...] = field(default=(), compare=False)
    attached_readers: int = field(default=0, compare=False)
    attached_writers: int = field(default=0, compare=False)

    @property
    def pool_usage(self) -> float:
        """referenced / total, 0 to 1."""
        return self.referenced / self.num_blocks if self.num_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        """hit tokens / queried tokens, 0 to 1; 0 without queries."""
        return self.hit_tokens / self.queries_tokens if self.queries_tokens else 0.0
