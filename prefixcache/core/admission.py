"""What a prompt finds in the pool and what it takes from it.

Lookup answers with a plan; Allocate is one that is carried out at once, by compiled code if nothing
is in its way.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prefixcache.core.form import FORM
from prefixcache.core.growth import num_blocks_of
from prefixcache.core.hashing import Chain
from prefixcache.core.pending import PendingBlocks
from prefixcache.core.pool import Pool
from prefixcache.core.quota import check_quota, no_room, num_over_quota
from prefixcache.core.sequence import Prompt, Sequence, int32_array, uint32_array
from prefixcache.errors import ExceedsPoolError
from prefixcache.types import BlockIds, CacheUse, FullHit

_native_begin_sequence: Callable[..., Sequence | None] | None = None
if FORM == "native":
    from prefixcache.core.native import admission as native_admission

    _native_begin_sequence = native_admission.begin_sequence

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class Plan(NamedTuple):
    """The hits of a prompt, and the blocks of its sequence; a named tuple, as `Terms`.

    num_needed: free blocks that it would use up, the new ones and those hits that are free.
    num_available: free blocks that its account can have. num_added: blocks that the account would
    hold more than now. num_over_quota: by how many blocks that is too much; below 0, how many more
    it may hold.
    num_pending_tokens: how many more tokens would be cached if all pending blocks were.
    """

    hits: BlockIds
    num_blocks: int
    num_needed: int
    num_available: int
    num_added: int
    num_over_quota: int
    num_cached_tokens: int
    num_pending_tokens: int

    def check_room(self, pool: Pool, account: int) -> None:
        """Raises ExceedsPoolError, QuotaExceededError or NoRoomError."""
        if self.num_blocks > pool.num_blocks:
            raise ExceedsPoolError("token_ids", self.num_blocks, pool.num_blocks)
        check_quota(pool, account, self.num_blocks, self.num_added)
        if self.num_needed > self.num_available:
            raise no_room(pool, account, self.num_needed, self.num_available)


def num_usable_blocks(num_tokens: int, full_hit: FullHit, block_size: int) -> int:
    """Full blocks of a prompt that may be hits."""
    return (num_tokens - (full_hit is FullHit.LAST_BLOCK)) // block_size


def plan_prompt(
    pool: Pool,
    pending: PendingBlocks,
    num_tokens: int,
    chain: Chain | None,
    num_lookahead_tokens: int,
    full_hit: FullHit,
    account: int = 0,
) -> Plan:
    """Plan a prompt of `num_tokens` tokens for an account; `chain` None takes no hits.

    At least one token is left to compute: of a full hit the last token, or the last block. A hit
    that another account has alone is taken only if what that reserves is there to be reserved.
    """
    size = pool.block_size
    hits, num_pending = _NO_BLOCKS, 0
    if chain is not None:
        num_usable = num_usable_blocks(num_tokens, full_hit, size)
        hits = pool.match(chain, num_usable)
        num_pending = pending.num_blocks(chain.hashes, len(hits), num_usable)
    num_blocks = num_blocks_of(num_tokens + num_lookahead_tokens, size)
    counts = pool.count_hits(hits, account)
    if counts.num_takeable < len(hits):
        # What comes next is cached: there is nothing to wait for.
        hits, num_pending = hits[: counts.num_takeable], 0
        counts = pool.count_hits(hits, account)
    num_new = num_blocks - len(hits)
    num_added = num_new + counts.num_new
    num_cached_tokens = min(len(hits) * size, num_tokens - 1)
    return Plan(
        hits=hits,
        num_blocks=num_blocks,
        num_needed=num_new + counts.num_free,
        num_available=pool.num_available(account, counts.num_reserved),
        num_added=num_added,
        num_over_quota=num_over_quota(pool, account, num_blocks, num_added),
        num_cached_tokens=num_cached_tokens,
        num_pending_tokens=min((len(hits) + num_pending) * size, num_tokens - 1)
        - num_cached_tokens,
    )


class Terms(NamedTuple):
    """On what a sequence begins, but for its prompt. num_layers: that count their computed tokens.

    A named tuple, which is made faster than a frozen dataclass: each Allocate makes one.
    """

    owner: bytes
    request_id: str
    num_lookahead_tokens: int
    cache_use: CacheUse
    full_hit: FullHit
    account: int
    registers: bool
    num_layers: int
    now_s: float


class Begun(NamedTuple):
    """A sequence with a reference on all blocks of its table, which nobody knows of yet.

    num_pending_tokens: as a `Plan` has them.
    """

    sequence: Sequence
    num_pending_tokens: int


def begin_sequence(pool: Pool, pending: PendingBlocks, prompt: Prompt, terms: Terms) -> Begun:
    """Carry out the plan that `plan_prompt` would make.

    Raises ExceedsPoolError, QuotaExceededError or NoRoomError, and changes nothing.
    """
    chain = prompt.chain if terms.cache_use.reads else None
    num_tokens = len(prompt.token_ids)
    if _native_begin_sequence is not None:
        sequence = _native_begin_sequence(pool, Sequence, prompt, terms)
        if sequence is not None:
            end = sequence.num_cached_blocks
            if chain is not None and pending.num_fillers:
                num_usable = num_usable_blocks(num_tokens, terms.full_hit, pool.block_size)
                end += pending.num_blocks(chain.hashes, end, num_usable)
            num_found = min(end * pool.block_size, num_tokens - 1)
            return Begun(sequence, num_found - sequence.num_cached_tokens)
    num_lookahead, account = terms.num_lookahead_tokens, terms.account
    plan = plan_prompt(pool, pending, num_tokens, chain, num_lookahead, terms.full_hit, account)
    plan.check_room(pool, account)
    if chain is not None:
        pool.acquire_hits(plan.hits, chain, account)
    new_blocks = pool.take(plan.num_blocks - len(plan.hits), account)
    table = int32_array(np.concatenate((plan.hits, new_blocks)))
    return Begun(_sequence(prompt, terms, table, plan, pool.block_size), plan.num_pending_tokens)


def _sequence(
    prompt: Prompt, terms: Terms, table: array[int], plan: Plan, block_size: int
) -> Sequence:
    hashes = prompt.chain.hashes.data if terms.registers and prompt.chain is not None else b""
    return Sequence(
        owner=terms.owner,
        request_id=terms.request_id,
        cache_use=terms.cache_use,
        extra_keys=prompt.extra_keys,
        token_ids=uint32_array(prompt.token_ids),
        block_table=table,
        hashes=bytearray(hashes),
        computed=[plan.num_cached_tokens] * terms.num_layers,
        num_prompt_tokens=len(prompt.token_ids),
        num_cached_tokens=plan.num_cached_tokens,
        num_cached_blocks=len(plan.hits),
        first_writable=len(plan.hits) * block_size,
        registers=terms.registers,
        created_at_s=terms.now_s,
        account=terms.account,
        num_lookahead_tokens=terms.num_lookahead_tokens,
    )
