"""How one sequence grows, shrinks and becomes findable: append, truncate, copy-on-write, commit.

Functions over one `Sequence` and the pool. Each checks everything, then changes; a refusal
leaves no trace. They do not know owners, batches or repeats: their callers do.
Not thread-safe: the core's lock guards them.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.extra_keys import (
    block_extra_keys,
    cut_extra_keys,
    merge_extra_keys,
    splits_block_of_item,
)
from prefixcache.core.hashing import BlockHashes, Chain, Hasher, hash_blocks
from prefixcache.core.pool import Pool
from prefixcache.core.quota import check_quota, no_room
from prefixcache.core.sequence import AppendRow, Sequence, uint32_array
from prefixcache.errors import (
    ExceedsPoolError,
    WrongPositionError,
)
from prefixcache.types import AppendResult, BlockCopy, BlockIds, ResultCode


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def append(pool: Pool, hasher: Hasher, sequence: Sequence, row: AppendRow) -> AppendResult:
    """Add tokens and the blocks they need; copy a partly filled last block that is not private.

    Raises ExceedsPoolError, QuotaExceededError or NoRoomError. The source of the copy before is let
    go, and what that frees counts as room. The sequence's reference on the source of this copy
    becomes a copy hold.
    """
    size = pool.block_size
    old, new = sequence.num_tokens, sequence.num_tokens + len(row.token_ids)
    num_blocks = num_blocks_of(new + row.num_lookahead_tokens, size)
    if num_blocks > pool.num_blocks:
        raise ExceedsPoolError("num_tokens", num_blocks, pool.num_blocks)
    grows = new + row.num_lookahead_tokens > old
    copied = old // size if grows and old % size and not _is_private(pool, sequence, old) else None
    num_added = max(0, num_blocks - len(sequence.block_table))
    needed = num_added + (copied is not None)
    _check_room(pool, sequence, num_blocks, needed)

    release_copy_holds(pool, sequence)
    taken = pool.take(needed, sequence.account)
    copies: tuple[BlockCopy, ...] = ()
    if copied is not None:
        source, destination = sequence.block_table[copied], int(taken[0])
        sequence.block_table[copied] = destination
        copies = (BlockCopy(source, destination),)
        sequence.copy_holds = [source]
        taken = taken[1:]
    sequence.block_table.frombytes(taken.tobytes())
    sequence.token_ids.extend(uint32_array(row.token_ids))
    sequence.extra_keys = merge_extra_keys(sequence.extra_keys, row.extra_keys)
    sequence.num_lookahead_tokens = row.num_lookahead_tokens
    if sequence.registers:
        hash_new_blocks(hasher, sequence)
    limit = old + row.num_kv_valid
    sequence.computed = [min(count, limit) for count in sequence.computed]
    return AppendResult(ResultCode.OK, tuple(taken.tolist()), copies)


def truncate(pool: Pool, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
    """Cut to `num_tokens` (1 to the present length) and drop all lookahead.

    Returns the block ids dropped, in table order.
    """
    size = pool.block_size
    dropped = drop_blocks_after(pool, sequence, num_tokens)
    if splits_block_of_item(sequence.extra_keys, num_tokens, size):
        # Its keys would be those of the whole item: a block that continues otherwise would take
        # another content's hash.
        stop_registering(sequence)
    del sequence.token_ids[num_tokens:]
    del sequence.hashes[num_tokens // size * pool.digest_bytes :]
    sequence.num_cached_blocks = min(sequence.num_cached_blocks, num_tokens // size)
    sequence.computed = [min(count, num_tokens) for count in sequence.computed]
    sequence.first_writable = min(sequence.first_writable, num_tokens)
    sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, num_tokens)
    sequence.extra_keys = cut_extra_keys(sequence.extra_keys, num_tokens, size)
    return dropped


def drop_blocks_after(pool: Pool, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
    """Release the blocks, lookahead included, that `num_tokens` tokens do not need.

    A copy hold goes first: its block stands deeper in the chain than some of those dropped, so
    it must leave before them for the cache to stay prefix-closed.
    """
    release_copy_holds(pool, sequence)
    keep = num_blocks_of(num_tokens, pool.block_size)
    dropped = sequence.blocks(keep)
    pool.release(dropped, sequence.account)
    del sequence.block_table[keep:]
    sequence.num_lookahead_tokens = 0
    return tuple(dropped.tolist())


def commit(pool: Pool, sequence: Sequence, num_computed: int) -> None:
    """Register the full blocks whose tokens have ids and complete K/V in every layer.

    num_computed: what `sequence.num_computed` says.
    """
    if not sequence.registers:
        return
    size = pool.block_size
    first = sequence.num_cached_blocks
    end = min(num_computed, len(sequence.token_ids)) // size
    if end <= first:
        return
    block_ids, width = sequence.blocks(first, end), pool.digest_bytes
    chain = Chain(
        BlockHashes(bytes(sequence.hashes[first * width : end * width]), width),
        sequence.tokens(first * size, end * size),
        block_extra_keys(sequence.extra_keys, first, end - first, size),
    )
    parent = sequence.block_table[first - 1] if first else None
    num_registered = pool.register(block_ids, chain, parent)
    sequence.num_cached_blocks += num_registered
    if num_registered < len(block_ids):
        # The hash belongs to other content: a deeper block would have an unfindable parent.
        stop_registering(sequence)


def check_position(sequence: Sequence, given: int, expected: int) -> None:
    if given != expected:
        raise WrongPositionError(sequence.sequence_id, given, expected)


def stop_registering(sequence: Sequence) -> None:
    sequence.registers = False
    sequence.hashes.clear()


def release_copy_holds(pool: Pool, sequence: Sequence) -> None:
    if sequence.copy_holds:
        pool.release(np.array(sequence.copy_holds, dtype=np.int32), sequence.account)
        sequence.copy_holds.clear()


def hash_new_blocks(hasher: Hasher, sequence: Sequence) -> None:
    """Hash the full blocks that have no hash yet."""
    size, width = hasher.block_size, hasher.algorithm.digest_bytes
    first, end = len(sequence.hashes) // width, sequence.num_tokens // size
    if end <= first:
        return
    parent = bytes(sequence.hashes[-width:]) if first else hasher.none_hash
    token_ids = sequence.tokens(first * size, end * size)
    keys = block_extra_keys(sequence.extra_keys, first, end - first, size)
    sequence.hashes += hash_blocks(hasher.algorithm, parent, token_ids, keys, size).data


def release_all(pool: Pool, sequence: Sequence) -> None:
    """Give back every block of a sequence that has ended."""
    release_copy_holds(pool, sequence)
    pool.release(sequence.blocks(), sequence.account)
    del sequence.block_table[:]


def release_written(pool: Pool, sequence: Sequence) -> BlockIds:
    """`release_all`, but plain blocks that may still be written to are quarantined, and returned.

    Those are the blocks that are not full with complete K/V of tokens, unless they are somebody's
    hit, and the sources of copies.
    """
    account, holds = sequence.account, np.array(sequence.copy_holds, dtype=np.int32)
    complete = min(sequence.num_computed, sequence.num_tokens)
    first = max(complete, sequence.first_writable) // pool.block_size
    sources = pool.quarantine(holds, 0, account)
    unwritten = pool.quarantine(sequence.blocks(), first, account)
    sequence.copy_holds.clear()
    del sequence.block_table[:]
    return np.concatenate((unwritten, sources))


def _check_room(pool: Pool, sequence: Sequence, num_blocks: int, needed: int) -> None:
    """Raises for a sequence of `num_blocks` blocks, `needed` of them new."""
    account, returned = sequence.account, _num_only_held_by_copy(pool, sequence)
    check_quota(pool, account, num_blocks, max(0, needed - returned))
    available = pool.num_available(account)
    if needed > available + returned:
        raise no_room(pool, account, needed, available)


def _num_only_held_by_copy(pool: Pool, sequence: Sequence) -> int:
    return sum(bool(pool.ref_cnt[block] == 1) for block in sequence.copy_holds)


def _is_private(pool: Pool, sequence: Sequence, position: int) -> bool:
    return pool.is_private(sequence.block_table[position // pool.block_size])
