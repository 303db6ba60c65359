"""What a prompt finds in the pool and what it takes from it. Changes nothing.

Lookup answers with a plan; Allocate makes one under the same lock and carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixcache.core.growth import num_blocks_of
from prefixcache.core.hashing import Chain
from prefixcache.core.pending import PendingBlocks
from prefixcache.core.pool import Pool
from prefixcache.errors import ExceedsPoolError, NoRoomError
from prefixcache.types import BlockIds, FullHit

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Plan:
    """The hits of a prompt, and the blocks of its sequence.

    num_needed: free blocks that it would use up, the new ones and those hits that are free.
    num_pending_tokens: how many more tokens would be cached if all pending blocks were.
    """

    hits: BlockIds
    num_blocks: int
    num_needed: int
    num_cached_tokens: int
    num_pending_tokens: int

    def check_room(self, pool: Pool) -> None:
        """Raises ExceedsPoolError or NoRoomError."""
        if self.num_blocks > pool.num_blocks:
            raise ExceedsPoolError("token_ids", self.num_blocks, pool.num_blocks)
        if self.num_needed > pool.num_free:
            raise NoRoomError(self.num_needed, pool.num_free, pool.num_referenced)


def plan_prompt(
    pool: Pool,
    pending: PendingBlocks,
    num_tokens: int,
    chain: Chain | None,
    num_lookahead_tokens: int,
    full_hit: FullHit,
) -> Plan:
    """Plan a prompt of `num_tokens` tokens; `chain` None takes no hits.

    At least one token is left to compute: of a full hit the last token, or the last block.
    """
    size = pool.block_size
    hits, num_pending = _NO_BLOCKS, 0
    if chain is not None:
        usable = num_tokens - (full_hit is FullHit.LAST_BLOCK)
        hits = pool.match(chain, usable // size)
        num_pending = pending.num_blocks(chain.hashes, len(hits), usable // size)
    num_blocks = num_blocks_of(num_tokens + num_lookahead_tokens, size)
    num_cached_tokens = min(len(hits) * size, num_tokens - 1)
    return Plan(
        hits=hits,
        num_blocks=num_blocks,
        num_needed=num_blocks - len(hits) + pool.num_free_among(hits),
        num_cached_tokens=num_cached_tokens,
        num_pending_tokens=min((len(hits) + num_pending) * size, num_tokens - 1)
        - num_cached_tokens,
    )
