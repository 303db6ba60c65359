"""What must hold after every call of the block manager, read from the real objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prefixcache.core.hashing import BlockHashes
from prefixcache.core.pool import PLAIN, REGISTERED, STANDBY, Pool
from prefixcache.core.sequence import Sequence
from prefixcache.core.sequences import Sequences


def check_invariants(
    sequences: Sequences,
    parent_of: Mapping[bytes, bytes] | None = None,
) -> None:
    """Assert the invariants of the pool and its sequences.

    parent_of: the parent hash of each hash, NONE_HASH included as a parent. Given, it is checked
    that no findable block has an unfindable parent.
    """
    pool, holders = sequences.pool, list(sequences.live.all_holders())
    _check_references(pool, holders, sequences.live.quarantine.block_ids)
    _check_free_queue(pool)
    _check_index(pool)
    _check_tables(pool, holders)
    _check_stats(sequences)
    if parent_of is not None:
        _check_prefix_closed(sequences, parent_of)


def snapshot(sequences: Sequences) -> dict[str, Any]:
    """Everything that a refused call must leave as it was; refusals are counted apart."""
    pool, stats = sequences.pool, sequences.stats()
    refusals = ("allocation_refused", "append_refused", "tenants")
    return {
        "free_order": pool.free_order().tolist(),
        "ref_cnt": pool.ref_cnt.tolist(),
        "states": [pool.state_of(block) for block in range(pool.num_blocks)],
        "hashes": [pool.hash_of(block) for block in range(pool.num_blocks)],
        "stats": {name: getattr(stats, name) for name in stats.__slots__ if name not in refusals},
        "accounts": [pool.account(number) for number in range(pool.num_accounts)],
        "sequences": [_progress(sequence) for sequence in sequences.live.all_holders()],
        "quarantined": sequences.live.quarantine.block_ids,
        "attachments": [sorted(session.attachments) for session in sequences.live.sessions],
    }


def _progress(sequence: Sequence) -> tuple[Any, ...]:
    return (
        sequence.sequence_id,
        sequence.tokens(0, sequence.num_tokens).tolist(),
        sequence.blocks().tolist(),
        bytes(sequence.hashes),
        list(sequence.computed),
        list(sequence.copy_holds),
        dict(sequence.last_attention_start),
        sequence.extra_keys,
        sequence.num_lookahead_tokens,
        sequence.num_cached_blocks,
        sequence.first_writable,
        sequence.registers,
        sequence.last_call,
        sequence.commit_before,
        sequence.is_busy,
    )


def _check_references(pool: Pool, holders: Iterable[Sequence], quarantined: list[int]) -> None:
    """A quarantined block is held by nothing else, and its content is nobody's."""
    held: Counter[int] = Counter(quarantined)
    assert pool.num_quarantined == len(quarantined)
    for block in quarantined:
        assert pool.ref_cnt[block] == held[block] == 1
        assert pool.state_of(block) == PLAIN
    for sequence in holders:
        held.update(sequence.block_table)
        held.update(sequence.copy_holds)
    assert pool.ref_cnt.tolist() == [held[block] for block in range(pool.num_blocks)]


def _check_free_queue(pool: Pool) -> None:
    order = pool.free_order().tolist()
    assert len(order) == len(set(order)) == pool.num_free
    assert set(order) == {block for block in range(pool.num_blocks) if pool.ref_cnt[block] == 0}
    assert pool.num_free + pool.num_referenced + pool.num_quarantined == pool.num_blocks
    _check_accounts(pool)
    cached = [block for block in order if pool.state_of(block) == REGISTERED]
    assert pool.num_evictable == len(cached)
    assert pool.num_blank == len(order) - len(cached) >= 0


def _check_accounts(pool: Pool) -> None:
    accounts = [pool.account(number) for number in range(pool.num_accounts)]
    assert sum(account.evictable for account in accounts) == pool.num_evictable
    assert sum(account.evictions for account in accounts) == pool.num_evictions
    num_held = pool.num_referenced + pool.num_quarantined
    assert sum(account.private for account in accounts) <= num_held
    assert sum(account.held for account in accounts) >= num_held
    if pool.num_unreserved() < 0:
        return
    for number, account in enumerate(accounts):
        # What is left of a guarantee can always be had, and nobody holds more than the others'
        # guarantees leave.
        assert account.private + pool.num_available(number) >= account.guaranteed
        assert account.held <= num_held
        assert pool.num_available(number) <= pool.num_free


def _check_index(pool: Pool) -> None:
    registered = 0
    for block in range(pool.num_blocks):
        state, block_hash = pool.state_of(block), pool.hash_of(block)
        assert (block_hash is None) == (state == PLAIN)
        if block_hash is None:
            continue
        holder = pool.block_of(block_hash)
        assert holder is not None
        assert pool.hash_of(holder) == block_hash
        if state == REGISTERED:
            registered += 1
            assert holder == block
        else:
            assert state == STANDBY
            assert holder != block
            assert pool.state_of(holder) == REGISTERED
            assert pool.ref_cnt[block] > 0
    assert registered == pool.num_cached


def _check_tables(pool: Pool, holders: Iterable[Sequence]) -> None:
    for sequence in holders:
        table, size = sequence.blocks().tolist(), pool.block_size
        assert len(table) == len(set(table))
        assert len(table) * size >= sequence.num_tokens + sequence.num_lookahead_tokens
        assert max(sequence.computed) <= sequence.num_tokens + sequence.num_lookahead_tokens
        if sequence.registers:
            hashes = list(BlockHashes(bytes(sequence.hashes), pool.digest_bytes))
            assert len(hashes) == sequence.num_tokens // size
            for block, block_hash in zip(table[: sequence.num_cached_blocks], hashes, strict=False):
                assert pool.hash_of(block) == block_hash


def _check_stats(sequences: Sequences) -> None:
    stats = sequences.stats()
    parts = (stats.referenced, stats.quarantined, stats.evictable, stats.blank)
    assert sum(parts) == stats.num_blocks
    assert min(parts) >= 0
    assert 0 <= stats.slots_written <= stats.referenced * stats.block_size
    assert 0.0 <= stats.hit_rate <= 1.0
    assert 0.0 <= stats.pool_usage <= 1.0
    assert stats.hit_tokens <= stats.queries_tokens
    assert stats.hit_blocks <= stats.queries_blocks
    ages = sequences.pool.ages()
    assert ages.lifetime.count == ages.idle_before_evict.count == stats.evictions
    assert ages.reuse_gap.count >= stats.hit_blocks  # Those of resumed sequences count too.


def _check_prefix_closed(sequences: Sequences, parent_of: Mapping[bytes, bytes]) -> None:
    pool = sequences.pool
    for block in range(pool.num_blocks):
        block_hash = pool.hash_of(block)
        if block_hash is None:
            continue
        parent = parent_of[block_hash]
        assert parent == sequences.hasher.none_hash or pool.block_of(parent) is not None, (
            f"block {block} is findable and its parent is not"
        )
