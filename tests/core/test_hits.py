"""What a lookup finds and what Allocate takes of it."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.pool import PLAIN, REGISTERED, STANDBY
from prefixcache.errors import NoRoomError
from prefixcache.types import CacheUse, ExtraKeys, FullHit
from tests.core.manager import ONE, TWO, Manager, T, U, refused
from tests.support.invariants import snapshot


def test_a_cold_prompt_misses_and_only_its_full_blocks_get_a_hash() -> None:
    manager = Manager(10, 16)
    assert manager.hit(T(55)) == 0
    held = manager.allocate(T(55))
    manager.commit(held)
    assert manager.refs(held.table) == [1, 1, 1, 1]
    assert [block_hash is not None for block_hash in manager.hashes(held.table)] == [
        *(True, True, True),
        False,
    ]


def test_a_shared_prefix_is_hit_while_its_first_holder_still_has_it() -> None:
    manager = Manager(10, 16)
    first = manager.allocate(T(55))
    manager.commit(first)
    second = manager.allocate(T(48) + U(5), owner=TWO)
    assert second.cached == 48
    assert second.table[:3] == first.table[:3]
    assert manager.refs(second.table) == [2, 2, 2, 1]
    assert second.table[3] not in first.table


def test_a_partly_filled_block_is_never_hit() -> None:
    manager = Manager(10)
    manager.fill(T(13))
    assert manager.hit(T(11)) == 8
    assert manager.hit(T(13)) == 12


@pytest.mark.parametrize("num_tokens", [5, 6])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_hit_is_a_multiple_of_the_block_size(size: int, num_tokens: int) -> None:
    manager = Manager(20, size)
    manager.fill(T(num_tokens))
    assert manager.hit([*T(num_tokens), 99]) == num_tokens // size * size


@pytest.mark.parametrize("verify_hits", [False, True])
def test_a_hole_at_the_head_of_the_chain_hides_what_follows(verify_hits: bool) -> None:
    manager = Manager(4, verify_hits=verify_hits)
    manager.fill(T(12))
    chain = manager.sequences.prepare(np.array(T(12), dtype=np.uint32), ExtraKeys()).chain
    blocks = manager.pool.match(chain, 3)
    # Only a broken pool has a hole: make one by taking the order of release into our own hands.
    manager.pool.acquire(blocks)
    manager.pool.release(blocks[1:])
    manager.pool.release(blocks[:1])
    manager.pool.take(manager.pool.num_blank)
    manager.pool.acquire(blocks[1:])
    manager.pool.take(1)
    assert manager.pool.block_of(chain.hashes[0]) is None
    assert manager.pool.block_of(chain.hashes[1]) is not None
    before = manager.pool.ref_cnt.tolist()
    assert manager.hit(T(12)) == 0
    assert manager.pool.ref_cnt.tolist() == before


def test_lookup_changes_nothing() -> None:
    """No reference, no order of eviction, no counter."""
    manager = Manager(8)
    manager.fill(T(8))
    manager.fill(U(8))
    before = snapshot(manager.sequences)
    for full_hit in FullHit:
        manager.lookup(T(9), lookahead=3, full_hit=full_hit)
    assert snapshot(manager.sequences) == before


def test_at_least_one_token_is_left_to_compute_of_a_fully_cached_prompt() -> None:
    manager = Manager(8, num_layers=2)
    first = manager.allocate(T(8))
    manager.attend(first)
    found = manager.lookup(T(8))
    assert (found.num_cached_tokens, found.num_cached_blocks) == (7, 2)
    second = manager.allocate(T(8), owner=TWO)
    assert second.cached == 7
    assert second.table == first.table
    ticket = manager.begin(0, second)
    (row,) = ticket.rows
    assert (row.start_position, row.num_tokens) == (7, 1)
    assert row.first_writable == 8, "the recomputed token must not be written"
    manager.end(ticket)
    manager.end(manager.begin(1, second))
    assert manager.states(second.table) == [REGISTERED, REGISTERED]
    assert manager.sequences.stats().cached == 2


def test_full_hit_last_block_computes_the_last_block_in_a_private_one() -> None:
    manager = Manager(8, num_layers=1)
    first = manager.allocate(T(8))
    manager.commit(first)
    second = manager.allocate(T(8), owner=TWO, full_hit=FullHit.LAST_BLOCK)
    assert second.cached == 4
    assert second.table[0] == first.table[0]
    assert second.table[1] not in first.table
    manager.commit(second)
    assert manager.states([first.table[1], second.table[1]]) == [REGISTERED, STANDBY]
    assert manager.lookup(T(8), full_hit=FullHit.LAST_BLOCK).num_cached_tokens == 4


def test_full_hit_last_block_is_the_same_where_the_prompt_is_no_multiple() -> None:
    manager = Manager(8)
    manager.fill(T(8))
    for full_hit in FullHit:
        assert manager.lookup(T(9), full_hit=full_hit).num_cached_tokens == 8


def test_one_token_blocks_leave_the_last_token_to_compute() -> None:
    manager = Manager(4, 1)
    manager.fill(T(1))
    found = manager.lookup(T(1))
    assert (found.num_cached_tokens, found.num_cached_blocks) == (0, 1)
    held = manager.allocate(T(1))
    assert held.cached == 0
    assert manager.commit(held).num_cached_blocks == 1
    assert manager.lookup(T(1), full_hit=FullHit.LAST_BLOCK).num_cached_blocks == 0


def test_lookup_allocate_and_the_first_computed_position_agree() -> None:
    manager = Manager(12, num_layers=2)
    held = manager.allocate(T(11))
    manager.attend(held)
    manager.free(held)
    for prompt in (T(8), T(9), T(11), T(12), T(3), U(5)):
        found = manager.lookup(prompt)
        held = manager.allocate(prompt)
        assert held.cached == found.num_cached_tokens
        (row,) = manager.begin(0, held).rows
        assert row.start_position == held.cached
        assert row.start_position + row.num_tokens == len(prompt)
        manager.sequences.free(ONE, [held.sequence_id])


def test_a_hit_that_grew_after_the_lookup_is_in_the_reply_of_allocate() -> None:
    manager = Manager(8, 256)
    assert manager.hit(T(465)) == 0
    manager.fill(T(256), ExtraKeys())
    held = manager.allocate(T(465))
    assert (held.cached, held.num_tokens - held.cached) == (256, 209)


def test_a_hit_that_shrank_after_the_lookup_is_in_the_reply_of_allocate() -> None:
    manager = Manager(4)
    manager.fill(T(8))
    assert manager.hit(T(12)) == 8
    other = manager.allocate(U(16), owner=TWO)
    manager.free(other)
    assert manager.allocate(T(12)).cached == 0


def test_lookup_says_how_many_free_blocks_allocate_will_use() -> None:
    """An idle hit leaves the free queue too, but only one block is popped."""
    manager = Manager(4)
    manager.fill(T(4))
    found = manager.lookup(T(8))
    assert (found.num_blocks_needed, found.num_blocks_free) == (2, 4)
    held = manager.allocate(T(8))
    assert manager.lookup(T(8)).num_blocks_free == 2
    assert manager.lookup(T(8)).num_blocks_needed == 1
    assert held.cached == 4


def test_a_block_is_not_findable_before_it_is_committed() -> None:
    manager = Manager(8)
    first = manager.allocate(T(8))
    assert manager.allocate(T(8), owner=TWO).cached == 0
    manager.commit(first)
    assert manager.allocate(T(8), owner=b"third").cached == 7


def test_a_block_is_not_findable_before_every_layer_is_computed() -> None:
    manager = Manager(8, num_layers=3)
    held = manager.allocate(T(9))
    for layer in (2, 0):
        manager.end(manager.begin(layer, held))
        assert manager.hit(T(9)) == 0
    manager.end(manager.begin(1, held, num_tokens=5))
    assert manager.hit(T(9)) == 4
    manager.end(manager.begin(1, held))
    assert manager.hit(T(9)) == 8


def test_a_request_that_skips_reading_gets_fresh_blocks_and_registers_them() -> None:
    manager = Manager(8)
    manager.fill(T(8))
    before = manager.sequences.stats()
    held = manager.allocate(T(8), cache_use=CacheUse.NO_READ)
    assert held.cached == 0
    after = manager.sequences.stats()
    assert after.queries_tokens == before.queries_tokens
    assert after.hit_tokens == before.hit_tokens
    assert after.requests == before.requests + 1
    other = manager.allocate(U(8), cache_use=CacheUse.NO_READ)
    manager.commit(other)
    assert manager.hit(U(8)) == 7


def test_a_request_that_does_not_write_takes_hits_and_registers_nothing() -> None:
    manager = Manager(8)
    manager.fill(T(4))
    held = manager.allocate(T(12), cache_use=CacheUse.NO_WRITE)
    assert held.cached == 4
    manager.commit(held)
    assert manager.hit(T(12)) == 4
    assert manager.states(held.table) == [REGISTERED, PLAIN, PLAIN]


def test_a_request_without_use_of_the_cache_neither_hits_nor_registers() -> None:
    manager = Manager(8)
    manager.fill(T(4))
    held = manager.allocate(T(8), cache_use=CacheUse.NONE)
    manager.commit(held)
    assert held.cached == 0
    assert manager.hit(T(8)) == 4
    assert manager.sequences.stats().queries_tokens == 4


def test_with_caching_off_nothing_is_ever_hit_and_the_pool_still_accounts() -> None:
    manager = Manager(7, caching=False)
    manager.fill(T(10))
    assert manager.hit(T(10)) == 0
    manager.allocate(T(10))
    assert manager.pool.num_referenced == 3
    manager.allocate(T(16))
    assert manager.pool.num_referenced == 7
    refused(manager, NoRoomError, lambda: manager.allocate(T(1)))
    assert manager.sequences.stats().queries_tokens == 0
    assert manager.pool.num_cached == 0
