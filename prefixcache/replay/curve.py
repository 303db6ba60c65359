"""Hits and evictions by size of the pool, from one walk of a trace.

Exact: equal to a replay of the trace through a pool of each size. Immutable, thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.replay.hit_rates import HitRates
from prefixcache.replay.reuse import Column, Reuse
from prefixcache.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class PoolCounts(HitRates):
    """What a replay counts with a pool of `num_blocks`; see `ReplayResult` for the words."""

    num_blocks: int
    block_size: int
    requests: int
    rejected: int
    query_blocks: int
    hit_blocks: int
    query_tokens: int
    hit_tokens: int
    evictions: int
    cached_end: int


class HitCurve:
    """Counts of all pools that admit the same requests as the walk that `reuse` comes of."""

    def __init__(self, trace: Trace, reuse: Reuse) -> None:
        self._reuse = reuse
        num_tokens = np.array([request.num_tokens for request in trace.requests], dtype=np.int64)
        self._query_tokens = int(num_tokens[reuse.is_admitted].sum())
        self._num_distinct = int(reuse.num_new.sum())
        self._hits = _hits_by_size(reuse)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._reuse.block_size

    @property
    def num_distinct(self) -> int:
        """Distinct full blocks."""
        return self._num_distinct

    @property
    def most_hit_blocks(self) -> int:
        """Hits of a pool that never evicts."""
        return int(self._hits[-1])

    @property
    def best_size(self) -> int:
        """Blocks of the smallest pool with as many hits as one that never evicts, 1 at least."""
        return max(1, len(self._hits) - 1)

    def hit_blocks(self, num_blocks: npt.ArrayLike) -> Column:
        """Hits of pools of so many blocks, any shape."""
        sizes = np.minimum(np.asarray(num_blocks, dtype=np.int64), len(self._hits) - 1)
        hits: Column = self._hits[sizes]
        return hits

    def smallest_pool(self, share: float) -> int:
        """Blocks of the smallest pool with `share` (0 to 1) of the most hits, 1 at least."""
        wanted = share * self.most_hit_blocks
        return max(1, int(np.searchsorted(self._hits, wanted, side="left")))

    def doubling_stops_at(self, least_gain: float) -> int:
        """Blocks from which on twice the pool adds less than `least_gain` (0 to 1) of all queried
        blocks to the hits, 1 at least.
        """
        sizes = np.arange(len(self._hits))
        gains = self.hit_blocks(2 * sizes) - self._hits
        is_worth = np.flatnonzero(gains >= least_gain * max(1, int(self._reuse.num_queried.sum())))
        return int(is_worth[-1]) + 1 if len(is_worth) else 1

    def at(self, num_blocks: int) -> PoolCounts:
        """Counts of one pool."""
        reuse = self._reuse
        hits, queries = int(self.hit_blocks(num_blocks)), int(reuse.num_queried.sum())
        cached_end = min(self._num_distinct, num_blocks - (reuse.fills_up_to < num_blocks))
        num_admitted = int(np.count_nonzero(reuse.is_admitted))
        return PoolCounts(
            num_blocks=num_blocks,
            block_size=reuse.block_size,
            requests=len(reuse.is_admitted),
            rejected=len(reuse.is_admitted) - num_admitted,
            query_blocks=queries,
            hit_blocks=hits,
            query_tokens=self._query_tokens,
            hit_tokens=hits * reuse.block_size,
            # What is missed is computed and cached, and leaves by eviction only.
            evictions=queries - hits - cached_end,
            cached_end=cached_end,
        )


def _hits_by_size(reuse: Reuse) -> Column:
    """`[largest size that matters + 1]`: entry N has the hits of a pool of N blocks."""
    ends = reuse.smallest_pool + reuse.num_blocks
    length = int(ends.max(initial=1))
    changes = np.bincount(reuse.smallest_pool, minlength=length + 1)
    changes -= np.bincount(ends, minlength=length + 1)
    blocks_at_size = np.cumsum(changes)[:length]
    hits: Column = np.cumsum(blocks_at_size)
    return hits
