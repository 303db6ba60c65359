"""What clients of the block manager see, one scenario a test, each named after the behaviour."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc

import numpy as np
import pytest

from prefixcache.core.hashing import HASH_ALGORITHMS, HashAlgorithm, Hasher
from prefixcache.core.pool import PLAIN, REGISTERED, STANDBY
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.errors import (
    BlocksInUseError,
    ExceedsPoolError,
    InvalidArgumentError,
    NoRoomError,
    NotComputedError,
    PrefixCacheError,
    RequestIdConflictError,
    SequenceBusyError,
    SequenceNotFoundError,
    WrongPositionError,
)
from prefixcache.types import (
    BlockCopy,
    CacheUse,
    ExtraKeys,
    FullHit,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    ResultCode,
)
from tests.core.manager import ONE, TWO, A, C, Held, Manager, T, U
from tests.support.invariants import check_invariants, snapshot

CONSTANT = HashAlgorithm("constant", 32, lambda data: b"\x00" * 32, True, False)


def refused(manager: Manager, error: type[PrefixCacheError], call) -> PrefixCacheError:
    """The call is refused with that error and changes nothing."""
    before = snapshot(manager.sequences)
    with pytest.raises(error) as caught:
        call()
    assert snapshot(manager.sequences) == before
    return caught.value


def image(identifier: str, offset: int, num_tokens: int) -> ExtraKeys:
    return ExtraKeys(multimodal_items=(MultimodalItem(identifier, offset, num_tokens),))


# ---- hits


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


def test_a_hole_at_the_head_of_the_chain_hides_what_follows() -> None:
    manager = Manager(4, verify_hits=True)
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


# ---- what tells contents apart


def test_only_the_equal_salt_hits() -> None:
    manager = Manager(12)
    salt_a, salt_b = ExtraKeys(cache_salt="a"), ExtraKeys(cache_salt="b")
    manager.fill(T(8), salt_a)
    assert manager.hit(T(9), salt_a) == 8
    assert manager.hit(T(9), salt_b) == 0
    assert manager.hit(T(9)) == 0


def test_a_lora_and_a_salt_of_the_same_spelling_do_not_meet() -> None:
    manager = Manager(12)
    lora, salt = ExtraKeys(Lora("S")), ExtraKeys(cache_salt="S")
    manager.fill(T(4), lora)
    assert manager.hit(T(5), salt) == 0
    manager.fill(U(4), salt)
    assert manager.hit(U(5), lora) == 0


def test_a_reloaded_lora_of_the_same_name_misses() -> None:
    manager = Manager(12)
    manager.fill(T(8), ExtraKeys(Lora("a", "v1")))
    assert manager.hit(T(9), ExtraKeys(Lora("a", "v1"))) == 8
    assert manager.hit(T(9), ExtraKeys(Lora("a", "v2"))) == 0
    assert manager.hit(T(9), ExtraKeys(Lora("a"))) == 0
    assert manager.hit(T(9)) == 0


def test_another_image_or_the_same_one_elsewhere_misses_from_its_block_on() -> None:
    manager = Manager(12)
    prompt = T(13)
    manager.fill(prompt, image("A", 6, 5))
    assert manager.hit(prompt, image("A", 6, 5)) == 12
    assert manager.hit(prompt, image("B", 6, 5)) == 4
    assert manager.hit(prompt, image("A", 7, 5)) == 4
    assert manager.hit(prompt) == 4


def test_an_image_over_a_block_edge_is_in_both_hashes() -> None:
    manager = Manager(12)
    manager.fill(T(9), image("A", 2, 4))
    assert manager.hit(T(9), image("A", 2, 4)) == 8
    assert manager.hit(T(9), image("B", 2, 4)) == 0


def test_an_image_of_a_second_turn_is_a_key_of_its_blocks() -> None:
    manager = Manager(16)
    held = manager.allocate(T(6))
    manager.append(held, U(8), extra_keys=image("A", 9, 3))
    manager.commit(held)
    prompt = T(6) + U(8)
    assert manager.hit(prompt, image("A", 9, 3)) == 12
    assert manager.hit(prompt, image("B", 9, 3)) == 8
    assert manager.hit(prompt) == 8


@pytest.mark.parametrize(
    "keys",
    [
        image("A", 1, 3),
        ExtraKeys(prompt_embeds=(PromptEmbeds(1, 3, (b"d" * 32,)),)),
    ],
)
def test_a_cut_through_an_image_or_embeds_never_lends_its_hash_to_other_content(
    keys: ExtraKeys,
) -> None:
    """After the cut the same token ids stand there, but not as a piece of the item."""
    manager = Manager(8)
    held = manager.allocate([5, 0, 0, 0, 6], keys)
    manager.truncate(held, 3)
    manager.append(held, [0, 6])
    manager.commit(held)
    assert manager.hit([5, 0, 0, 0, 6], keys) == 0


def test_a_cut_through_an_image_at_a_block_edge_keeps_what_is_whole() -> None:
    manager = Manager(8)
    held = manager.allocate(T(8), image("A", 2, 4))
    manager.truncate(held, 4)
    manager.append(held, U(4))
    manager.commit(held)
    assert manager.hit(T(4) + U(4), image("A", 2, 4)) == 4
    assert manager.hit([*T(4), *U(4), 1], image("A", 2, 2)) == 8


@pytest.mark.parametrize("name", ["xxhash_cbor", "xxh3", "sha256_cbor"])
def test_a_hash_that_always_collides_gives_a_miss_and_never_anothers_block(name: str) -> None:
    recipe = HASH_ALGORITHMS[name]
    colliding = HashAlgorithm(
        name,
        recipe.digest_bytes,
        lambda data: b"\x01" * recipe.digest_bytes,
        recipe.uses_cbor,
        False,
    )
    manager = Manager(12, algorithm=colliding, verify_hits=True)
    manager.fill(T(8))
    assert manager.hit(T(8)) == 4
    assert manager.hit(U(8)) == 0
    assert manager.hit(T(4), ExtraKeys(cache_salt="s")) == 0
    held = manager.allocate(U(8))
    manager.commit(held)
    assert manager.hit(U(8)) == 0
    assert manager.states(held.table) == [PLAIN, PLAIN]


def test_after_a_collision_a_sequence_registers_nothing_deeper() -> None:
    """A deeper block would be findable under a parent that is not its own."""

    def first_token_only(data: bytes) -> bytes:
        # [parent, [t0, ...]]: 0x83, 0x58 0x20 + 32 bytes, array head, then small ints.
        return data.ljust(37, b"\x00")[36:37] * 32

    algorithm = HashAlgorithm("first token", 32, first_token_only, True, False)
    manager = Manager(12, algorithm=algorithm, verify_hits=True)
    held = manager.allocate([1, 0, 0, 0, 2, 0, 0, 0])
    manager.commit(held)
    other = manager.allocate([3, 0, 0, 0, 2, 9, 9, 9, 4, 0, 0, 0])
    manager.commit(other)
    assert manager.states(other.table) == [REGISTERED, PLAIN, PLAIN]
    assert manager.append(other, [5, 0, 0, 0]).code is ResultCode.OK
    manager.commit(other)
    assert manager.states(other.table) == [REGISTERED, PLAIN, PLAIN, PLAIN]


# ---- eviction and its order


def test_a_keyless_block_is_used_before_any_cached_one() -> None:
    manager = Manager(10)
    first = manager.allocate(T(14))
    manager.commit(first)
    manager.free(first)
    second = manager.allocate(U(1))
    assert second.table == [first.table[3]]
    assert manager.sequences.stats().evictions == 0


def test_the_whole_pool_can_be_reclaimed_cached_blocks_last_and_deepest_first() -> None:
    manager = Manager(10)
    cached = manager.fill(T(12))
    held = manager.allocate(U(40))
    assert held.table[-3:] == cached[::-1]
    stats = manager.sequences.stats()
    assert (stats.evictions, stats.evictable, stats.blank) == (3, 0, 0)
    assert manager.pool.num_free == 0


def test_blocks_of_one_sequence_leave_deepest_first_so_the_prefix_keeps_hitting() -> None:
    for seed in range(50):
        manager = Manager(3)
        manager.fill(T(12))
        manager.fill([seed + 100])
        assert manager.hit(T(13)) == 8


def test_hit_blocks_leave_the_free_queue_and_survive() -> None:
    manager = Manager(10)
    blocks = manager.fill(T(14))
    manager.fill(U(10))
    held = manager.allocate(T(8))
    assert not set(blocks[:2]) & set(manager.free_order())
    assert manager.allocate(C(1)).table[0] not in held.table
    assert manager.sequences.stats().evictions == 0


def test_a_hit_makes_a_block_young() -> None:
    manager = Manager(4)
    a, c = manager.fill(A(8)), manager.fill(C(8))
    held = manager.allocate(A(8))
    assert held.cached == 7
    manager.free(held)
    victim = manager.allocate([1]).table
    assert victim == [c[1]]
    assert manager.hit([*A(8), 1]) == 8
    assert not set(victim) & set(a)


def test_the_deepest_hit_block_is_held_too() -> None:
    manager = Manager(8)
    manager.fill(T(12))
    held = manager.allocate(T(13))
    assert held.cached == 12
    other = manager.allocate(U(16), owner=TWO)
    assert not set(other.table) & set(held.table)
    assert manager.hit(T(13)) == 12


def test_exactly_what_is_needed_is_evicted() -> None:
    manager = Manager(100)
    for number in range(100):
        manager.fill([number, 1, 2, 3])
    assert manager.sequences.stats().evictable == 100
    manager.allocate(T(4))
    assert manager.sequences.stats().evictions == 1
    manager.allocate(U(7))
    assert manager.sequences.stats().evictions == 3


def test_a_need_beyond_what_can_be_evicted_is_refused_and_evicts_nothing() -> None:
    manager = Manager(4)
    manager.fill(T(4))
    manager.allocate(U(12))
    error = refused(manager, NoRoomError, lambda: manager.allocate(C(8)))
    assert error.fields == {"needed": 2, "free": 1, "referenced": 3}
    assert manager.sequences.stats().evictions == 0


def test_blocks_are_evicted_one_by_one_and_ids_stay_distinct_and_in_range() -> None:
    manager = Manager(4)
    for first in (1, 100, 200, 300):
        manager.fill(list(range(first, first + 4)))
    seen: list[int] = []
    for count in (1, 2):
        seen += manager.allocate([9]).table
        assert manager.sequences.stats().evictions == count
    assert len(set(seen)) == 2
    assert set(seen) <= set(range(4))


def test_a_long_scan_flushes_the_hot_prefix_because_the_order_is_lru() -> None:
    manager = Manager(64)
    hot = T(16)
    manager.fill(hot)
    for _ in range(100):
        manager.fill(hot)
    for number in range(64):
        manager.fill([number + 1000, 0, 0, 0])
    assert manager.hit([*hot, 1]) == 0


def test_a_block_reused_for_other_tokens_loses_its_old_hash() -> None:
    manager = Manager(1)
    manager.fill(A(4))
    manager.fill(C(4))
    assert manager.hit([*A(4), 1]) == 0
    assert manager.hit([*C(4), 1]) == 4


def test_a_reused_block_that_is_not_full_has_no_hash() -> None:
    manager = Manager(1, 16)
    manager.fill(T(16))
    held = manager.allocate(U(15))
    manager.commit(held)
    assert manager.hashes(held.table) == [None]
    assert manager.hit(T(16)) == 0


def test_the_index_never_holds_more_than_the_pool_and_memory_stays_flat() -> None:
    manager = Manager(64)

    def fill_many(first: int, count: int) -> None:
        for number in range(first, first + count):
            held = manager.sequences.allocate(
                ONE,
                "",
                manager.sequences.prepare(
                    np.array([number, number, 1, 2], dtype=np.uint32), ExtraKeys()
                ),
            )
            manager.sequences.commit(ONE, [CommitRow(held.sequence_id, 0, 4)])
            manager.sequences.free(ONE, [held.sequence_id])

    fill_many(0, 500)
    gc.collect()
    tracemalloc.start()
    fill_many(500, 2000)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manager.pool.num_cached == 64
    assert grown < 64 * 1024


def test_a_result_keeps_its_block_ids_when_the_table_goes_on() -> None:
    manager = Manager(8)
    prompt = manager.sequences.prepare(np.array(T(4), dtype=np.uint32), ExtraKeys())
    reply = manager.sequences.allocate(ONE, "", prompt)
    held = Held(ONE, reply.sequence_id, 4, 0, reply.block_ids.tolist())
    before = reply.block_ids.tolist()
    manager.append(held, T(8))
    manager.free(held)
    manager.fill(U(32))
    assert reply.block_ids.tolist() == before


# ---- one registered block a hash: standbys


def two_at_once(manager: Manager, tokens: list[int]) -> tuple[Held, Held]:
    """Two clients fill the same prompt at the same time; the first commits first."""
    first = manager.allocate(tokens)
    second = manager.allocate(tokens, owner=TWO)
    manager.commit(first)
    manager.commit(second)
    return first, second


def test_two_holders_of_one_content_keep_their_own_blocks() -> None:
    manager = Manager(8)
    first, second = two_at_once(manager, T(8))
    assert not set(first.table) & set(second.table)
    assert manager.table(first) == first.table
    assert manager.table(second) == second.table
    assert manager.states(first.table) == [REGISTERED, REGISTERED]
    assert manager.states(second.table) == [STANDBY, STANDBY]
    assert manager.hashes(first.table) == manager.hashes(second.table)
    assert manager.sequences.stats().cached == 2


def test_the_second_copy_takes_over_when_the_first_is_evicted_and_no_eviction_counts() -> None:
    manager = Manager(4)
    first, second = two_at_once(manager, T(8))
    manager.free(first)
    other = manager.allocate(U(8))
    assert sorted(other.table) == sorted(first.table)
    assert manager.sequences.stats().evictions == 0
    assert manager.states(second.table) == [REGISTERED, REGISTERED]
    assert manager.hit([*T(8), 1]) == 8
    manager.free(second)
    assert manager.sequences.stats().evictable == 2


def test_a_released_standby_makes_its_registered_block_young() -> None:
    manager = Manager(8)
    first, second = two_at_once(manager, T(8))
    manager.free(first)
    other = manager.fill(U(8))
    manager.free(second)
    assert manager.free_order()[-4:] == [*other[::-1], *first.table[::-1]]
    assert manager.free_order()[:2] == second.table[::-1]
    assert manager.states(second.table) == [PLAIN, PLAIN]


def test_a_child_never_outlives_its_parent_that_a_standby_stood_in_for() -> None:
    """The second client's child hangs on the first client's block, which was freed long ago."""
    manager = Manager(6)
    first = manager.allocate(T(4))
    second = manager.allocate(T(8), owner=TWO)
    manager.commit(first)
    manager.commit(second)
    manager.free(first)
    manager.free(second)
    manager.allocate(U(17), owner=TWO)
    assert manager.hit([*T(8), 1]) == 4
    assert manager.sequences.stats().evictions == 1


def test_a_standby_of_an_evicted_hash_that_is_gone_registers_itself() -> None:
    manager = Manager(4)
    manager.fill(T(4))
    second = manager.allocate(T(4), cache_use=CacheUse.NO_READ)
    manager.free(manager.allocate(U(12), owner=TWO))
    assert manager.hit([*T(4), 1]) == 0
    manager.commit(second)
    assert manager.states(second.table) == [REGISTERED]


def test_three_copies_of_one_content_take_over_one_after_the_other() -> None:
    manager = Manager(3)
    copies = [manager.allocate(T(4), owner=bytes([number])) for number in range(3)]
    for held in copies:
        manager.commit(held)
    for held in copies[:2]:
        manager.free(held)
        taken = manager.allocate(U(4))
        assert taken.table == held.table
        assert manager.hit([*T(4), 1]) == 4
    assert manager.sequences.stats().evictions == 0


# ---- allocate


def test_hits_are_held_before_new_blocks_are_taken() -> None:
    """The hits stand at the head of the free queue, where new blocks come from."""
    manager = Manager(4)
    cached = manager.fill(T(8))
    blank = manager.allocate(U(8))
    manager.pool.acquire(np.array(cached, dtype=np.int32))
    manager.pool.release(np.array(cached, dtype=np.int32))
    manager.free(blank)
    other = manager.allocate(U(8))
    assert manager.free_order() == cached[::-1]
    manager.free(other)
    held = manager.allocate(T(8) + A(8))
    assert held.cached == 8
    assert held.table[:2] == cached
    assert len(set(held.table)) == 4
    assert manager.sequences.stats().evictions == 0


def test_room_does_not_count_free_blocks_that_are_about_to_be_hits() -> None:
    manager = Manager(6)
    manager.fill(T(8))
    manager.allocate(U(1), owner=TWO)
    error = refused(manager, NoRoomError, lambda: manager.allocate(T(8) + A(16)))
    assert error.fields == {"needed": 6, "free": 5, "referenced": 1}
    assert manager.allocate(T(8) + A(12)).cached == 8


def test_a_request_larger_than_the_pool_is_a_permanent_error() -> None:
    manager = Manager(7)
    error = refused(manager, ExceedsPoolError, lambda: manager.allocate(T(32)))
    assert error.fields["needed"] == 8
    assert error.fields["num_blocks"] == 7
    assert len(manager.allocate(T(28)).table) == 7


def test_lookahead_counts_in_what_a_request_needs() -> None:
    manager = Manager(2)
    refused(manager, ExceedsPoolError, lambda: manager.allocate(T(8), num_lookahead_tokens=1))
    assert len(manager.allocate(T(6), num_lookahead_tokens=2).table) == 2


def test_everything_referenced_is_refused_at_once_with_the_numbers() -> None:
    manager = Manager(3)
    manager.allocate(T(12))
    error = refused(manager, NoRoomError, lambda: manager.allocate([1]))
    assert error.fields == {"needed": 1, "free": 0, "referenced": 3}


def test_the_need_that_lookup_predicts_is_what_is_taken() -> None:
    manager = Manager(12)
    manager.fill(T(8))
    for num_tokens in (4, 8, 12, 16):
        needed = manager.lookup(T(num_tokens)).num_blocks_needed
        free = manager.pool.num_free
        held = manager.allocate(T(num_tokens))
        assert free - manager.pool.num_free == needed
        manager.free(held)


def test_blocks_of_a_common_prefix_stay_while_one_holder_is_left() -> None:
    manager = Manager(10)
    first = manager.allocate(T(12))
    manager.commit(first)
    second = manager.allocate(T(12) + U(10))
    assert second.cached == 12
    manager.free(second)
    assert manager.refs(first.table) == [1, 1, 1]
    assert set(second.table[3:]) <= set(manager.free_order())


# ---- append


def test_decode_registers_a_block_when_it_fills_it() -> None:
    manager = Manager(10, 16)
    held = manager.allocate(T(55))
    manager.commit(held)
    assert manager.append(held, U(4)).new_block_ids == ()
    manager.commit(held)
    assert manager.hashes(held.table)[3] is None
    assert len(manager.append(held, C(19)).new_block_ids) == 1
    manager.commit(held)
    assert manager.hashes(held.table)[3] is not None
    assert manager.hashes(held.table)[4] is None


def test_a_new_block_comes_with_the_first_token_past_an_edge() -> None:
    manager = Manager(10)
    at_edge, before_edge = manager.allocate(T(8)), manager.allocate(U(7))
    assert len(manager.append(at_edge, [1]).new_block_ids) == 1
    assert manager.append(before_edge, [1]).new_block_ids == ()
    manager.commit(before_edge, 7)
    assert manager.hashes(before_edge.table)[1] is None
    manager.commit(before_edge)
    assert manager.hashes(before_edge.table)[1] is not None
    assert len(manager.append(before_edge, [1]).new_block_ids) == 1


def test_rows_of_append_go_in_order_and_one_that_does_not_fit_stops_no_other() -> None:
    manager = Manager(5)
    first, second, third = (manager.allocate(make(4)) for make in (T, U, C))
    rows = [
        AppendRow(held.sequence_id, 4, np.arange(count, dtype=np.uint32))
        for held, count in ((first, 1), (second, 5), (third, 1))
    ]
    results = manager.sequences.append(ONE, rows)
    check_invariants(manager.sequences)
    assert [row.code for row in results] == [ResultCode.OK, ResultCode.NO_ROOM, ResultCode.OK]
    assert manager.table(second) == second.table
    assert manager.record(second).num_tokens == 4


def test_append_past_the_pool_is_a_permanent_refusal() -> None:
    manager = Manager(2)
    held = manager.allocate(T(8))
    before = snapshot(manager.sequences)
    assert manager.append(held, [1], start=8).code is ResultCode.EXCEEDS_POOL
    assert snapshot(manager.sequences) == before


def test_append_at_another_position_is_refused() -> None:
    manager = Manager(4)
    held = manager.allocate(T(6))
    before = snapshot(manager.sequences)
    for start in (5, 7):
        assert manager.append(held, [1], start=start).code is ResultCode.WRONG_POSITION
    assert snapshot(manager.sequences) == before


def test_tables_only_grow_in_append() -> None:
    manager = Manager(20)
    held = manager.allocate(T(5), num_lookahead_tokens=8)
    for count in (1, 0, 4, 3):
        before = list(held.table)
        manager.append(held, U(count))
        assert held.table[: len(before)] == before


# ---- drafts


def test_a_draft_registers_nothing_before_it_is_accepted() -> None:
    manager = Manager(8, num_layers=2)
    held = manager.allocate(T(6), num_lookahead_tokens=3)
    manager.attend(held)
    manager.attend(held, num_tokens=3)
    assert manager.computed(held) == 9
    assert manager.hit([*T(6), 7, 8, 9]) == 4
    manager.append(held, [7, 50], kv_valid=1)
    assert manager.computed(held) == 7, "the rejected draft's K/V are void"
    assert manager.hit([*T(7), 50, 9]) == 4
    manager.attend(held)
    assert manager.hit([*T(7), 50, 9]) == 8


def test_accepted_drafts_that_fill_a_block_register_it_without_a_new_computation() -> None:
    manager = Manager(8, num_layers=2)
    held = manager.allocate(T(6), num_lookahead_tokens=3)
    manager.attend(held)
    manager.attend(held, num_tokens=3)
    manager.append(held, [7, 8], kv_valid=2, lookahead=1)
    assert manager.hit(T(9)) == 8
    assert manager.computed(held) == 8


@pytest.mark.parametrize(
    ("size", "num_tokens", "lookahead", "num_blocks"),
    [(16, 14, 4, 2), (4, 6, 9, 4), (4, 6, 1, 2), (4, 7, 1, 3)],
)
def test_slots_are_reserved_for_every_draft_token(
    size: int, num_tokens: int, lookahead: int, num_blocks: int
) -> None:
    manager = Manager(8, size)
    held = manager.allocate(T(num_tokens))
    manager.append(held, [1], lookahead=lookahead)
    assert len(held.table) == num_blocks == -(-(num_tokens + 1 + lookahead) // size)


def test_drafts_past_the_reserved_slots_are_refused() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(6), num_lookahead_tokens=1)
    manager.attend(held)
    refused(manager, PrefixCacheError, lambda: manager.begin(0, held, num_tokens=2))
    manager.attend(held, num_tokens=1)


def test_truncate_drops_drafts_and_their_blocks() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(6), num_lookahead_tokens=6)
    manager.attend(held)
    manager.attend(held, num_tokens=5)
    dropped = manager.truncate(held, 6)
    assert len(dropped) == 1
    assert manager.computed(held) == 6
    refused(manager, PrefixCacheError, lambda: manager.begin(0, held, num_tokens=1))


# ---- fork, truncate and copy-on-write


def forked(manager: Manager, num_tokens: int = 6) -> tuple[Held, Held]:
    parent = manager.allocate(T(num_tokens))
    manager.commit(parent)
    (child,) = manager.fork(parent)
    return parent, child


def test_fork_shares_all_blocks() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    assert child.table == parent.table
    assert manager.refs(parent.table) == [2, 2]


def test_the_half_filled_tail_of_a_fork_is_copied_by_the_first_writer() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    tail = parent.table[1]
    result = manager.append(child, [70, 80])
    assert result.copies == (BlockCopy(tail, child.table[1]),)
    assert child.table[1] != tail
    assert parent.table[1] == tail
    assert child.table[0] == parent.table[0]
    manager.commit(child)
    manager.append(parent, [7, 8])
    manager.commit(parent)
    assert manager.hit([*T(6), 7, 8, 1]) == 8
    assert manager.hit([*T(6), 70, 80, 1]) == 8


def test_the_last_writer_of_a_fork_writes_in_place() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    manager.append(child, [70])
    manager.commit(child)
    assert manager.append(parent, [7]).copies == ()


def test_a_full_block_is_never_copied() -> None:
    manager = Manager(8)
    _, child = forked(manager, 8)
    assert manager.append(child, [1]).copies == ()


def test_drafts_in_a_shared_tail_are_copied_for_too() -> None:
    manager = Manager(8)
    _, child = forked(manager)
    assert len(manager.append(child, [], lookahead=1).copies) == 1


def test_an_append_that_puts_nothing_into_a_shared_tail_copies_nothing() -> None:
    manager = Manager(8)
    _, child = forked(manager)
    assert manager.append(child, []).copies == ()


def test_append_counts_the_copy_in_what_it_needs() -> None:
    manager = Manager(3)
    _, child = forked(manager)
    other = manager.allocate(U(1), owner=TWO)
    before = snapshot(manager.sequences)
    assert manager.append(child, [1], start=6).code is ResultCode.NO_ROOM
    assert snapshot(manager.sequences) == before
    manager.free(other)
    assert manager.append(child, [1]).code is ResultCode.OK


def test_the_source_of_a_copy_is_held_until_the_next_call_that_is_no_repeat() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    tail = parent.table[1]
    first = manager.append(child, [70])
    manager.free(parent)
    assert manager.refs([tail]) == [1]
    again = manager.append(child, [70], start=6)
    assert again == first
    assert manager.refs([tail]) == [1]
    assert manager.append(child, [1], start=3).code is ResultCode.WRONG_POSITION
    assert manager.refs([tail]) == [1], "a refused call ends no hold"
    manager.commit(child)
    assert manager.refs([tail]) == [0]


@pytest.mark.parametrize("call", ["append", "truncate", "fork", "free"])
def test_any_applied_call_ends_the_hold_on_a_copys_source(call: str) -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    tail = parent.table[1]
    manager.append(child, [])
    manager.append(child, [], lookahead=1)
    manager.free(parent)
    assert manager.refs([tail]) == [1]
    if call == "append":
        manager.append(child, [1])
    elif call == "truncate":
        manager.truncate(child, 6)
    elif call == "fork":
        manager.fork(child)
    else:
        manager.free(child)
    assert manager.refs([tail]) == [0]


def test_the_source_of_the_copy_before_is_room_for_the_next_append() -> None:
    manager = Manager(3)
    parent, child = forked(manager)
    manager.append(child, [70, 80])
    manager.free(parent)
    assert manager.pool.num_free == 0
    assert manager.append(child, [90]).code is ResultCode.OK
    assert len(manager.table(child)) == 3


def test_a_copys_source_never_outlives_its_parent() -> None:
    """Truncating below the copied block must not leave its old self behind its ancestors."""
    manager = Manager(8)
    held = manager.allocate(T(12))
    manager.commit(held)
    deep = held.table[2]
    manager.truncate(held, 10)
    assert manager.append(held, [99]).copies == (BlockCopy(deep, held.table[2]),)
    manager.truncate(held, 4)
    assert manager.free_order()[-2] == deep
    other = manager.allocate(U(16 + 8), owner=TWO)
    assert deep in other.table
    assert manager.hit(T(12)) == 8


def test_truncate_keeps_what_was_committed_and_the_next_append_copies() -> None:
    manager = Manager(8)
    held = manager.allocate(T(8))
    manager.commit(held)
    assert manager.truncate(held, 6) == ()
    assert manager.hit([*T(8), 1]) == 8
    cached = held.table[1]
    result = manager.append(held, [70])
    assert result.copies == (BlockCopy(cached, held.table[1]),)
    assert manager.hit([*T(8), 1]) == 8
    manager.append(held, [80])
    manager.commit(held)
    assert manager.hit([*T(6), 70, 80, 1]) == 8


def test_the_same_content_after_a_cut_stands_by() -> None:
    manager = Manager(8)
    held = manager.allocate(T(8))
    manager.commit(held)
    cached = held.table[1]
    manager.truncate(held, 6)
    manager.append(held, [7, 8])
    manager.commit(held)
    assert manager.states([cached, held.table[1]]) == [REGISTERED, STANDBY]
    manager.truncate(held, 7)
    standby = held.table[1]
    assert manager.append(held, [8]).copies[0].source == standby


def test_truncate_at_a_block_edge_needs_no_copy() -> None:
    manager = Manager(8)
    held = manager.allocate(T(8))
    manager.commit(held)
    last = held.table[1]
    assert manager.truncate(held, 4) == (last,)
    assert manager.append(held, [1]).copies == ()


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_truncate_beyond_the_sequence_or_to_nothing_is_refused(num_tokens: int) -> None:
    manager = Manager(8)
    held = manager.allocate(T(8))
    refused(manager, InvalidArgumentError, lambda: manager.truncate(held, num_tokens))


def test_fork_needs_all_tokens_computed() -> None:
    manager = Manager(8)
    held = manager.allocate(T(6))
    manager.commit(held, 5)
    error = refused(manager, NotComputedError, lambda: manager.fork(held))
    assert (error.fields["num_computed"], error.fields["num_tokens"]) == (5, 6)
    full_hit = manager.fill(U(8)) and manager.allocate(U(8))
    refused(manager, NotComputedError, lambda: manager.fork(full_hit))


def test_fork_drops_the_lookahead_of_both_sides() -> None:
    manager = Manager(8)
    held = manager.allocate(T(6), num_lookahead_tokens=6)
    manager.commit(held)
    (child,) = manager.fork(held)
    assert len(held.table) == len(child.table) == 2
    assert manager.pool.num_free == 6


def test_fork_hands_on_extra_keys_and_cache_use() -> None:
    manager = Manager(12)
    salt = ExtraKeys(cache_salt="s")
    held = manager.allocate(T(6), salt)
    manager.commit(held)
    (child,) = manager.fork(held)
    manager.append(child, [7, 8])
    manager.commit(child)
    assert manager.hit(T(9), salt) == 8
    assert manager.hit(T(9)) == 0
    silent = manager.allocate(U(4), cache_use=CacheUse.NO_WRITE)
    manager.commit(silent)
    (child,) = manager.fork(silent)
    manager.append(child, U(4))
    manager.commit(child)
    assert manager.hit([*U(4), 1]) == 0


def test_parent_and_child_can_be_freed_in_any_order_and_each_only_once() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    assert manager.free(parent) == [ResultCode.OK]
    assert manager.free(child) == [ResultCode.OK]
    assert manager.free(parent) == [ResultCode.NOT_FOUND]
    assert manager.pool.num_free == 8


def test_slots_come_from_the_table_where_blocks_are_scattered() -> None:
    manager = Manager(8, num_layers=1)
    blockers = [manager.allocate([number]) for number in range(4)]
    manager.free(blockers[2], blockers[0])
    held = manager.allocate(T(8))
    assert held.table == [0, 2]
    manager.append(held, [1])
    (row,) = manager.begin(0, held).rows
    assert row.block_table.tolist() == held.table == [0, 2, 4]


# ---- free


def test_free_is_idempotent_and_gives_each_block_back_once() -> None:
    manager = Manager(4)
    held = manager.allocate(T(8))
    codes = manager.sequences.free(ONE, [held.sequence_id, held.sequence_id, 12345])
    assert codes == [ResultCode.OK, ResultCode.NOT_FOUND, ResultCode.NOT_FOUND]
    assert sorted(manager.free_order()) == [0, 1, 2, 3]
    assert not manager.pool.ref_cnt.any()


def test_two_threads_that_free_one_sequence_free_it_once() -> None:
    manager = Manager(4)
    for _ in range(20):
        held = manager.allocate(T(8))
        start, codes = threading.Barrier(2), []

        def free(held: Held = held, start: threading.Barrier = start, codes: list = codes) -> None:
            start.wait()
            with manager.sequences.lock:
                codes.extend(manager.sequences.free(ONE, [held.sequence_id]))

        threads = [threading.Thread(target=free) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(codes) == [ResultCode.OK, ResultCode.NOT_FOUND]
        check_invariants(manager.sequences)


def test_blocks_come_back_after_every_request() -> None:
    manager = Manager(8)
    for number in range(20):
        manager.fill([number * 100 + step for step in range(10)])
        stats = manager.sequences.stats()
        assert stats.referenced == 0
        assert stats.evictable + stats.blank == 8
    assert manager.sequences.stats().evictions > 0


def test_idle_books_balance_after_random_clients_of_a_common_prefix() -> None:
    rng = random.Random(3)
    manager = Manager(40)
    live: list[Held] = []
    for step in range(600):
        if live and rng.random() < 0.5:
            held = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.5:
                manager.commit(held)
            manager.free(held)
            continue
        prompt = T(12) + [step % 7] * rng.randrange(1, 9)
        try:
            live.append(manager.allocate(prompt, owner=bytes([step % 64])))
        except NoRoomError:
            manager.free(live.pop(0))
    manager.free(*live)
    stats = manager.sequences.stats()
    assert (stats.referenced, stats.evictable + stats.blank) == (0, 40)


# ---- owners and request ids


def test_a_sequence_answers_only_its_owner() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(6))
    manager.commit(held)
    stranger = Held(TWO, held.sequence_id, 6, 0, held.table)
    before = snapshot(manager.sequences)
    assert manager.sequences.free(TWO, [held.sequence_id]) == [ResultCode.NOT_FOUND]
    assert manager.append(stranger, [1], start=6).code is ResultCode.NOT_FOUND
    assert manager.sequences.commit(TWO, [CommitRow(held.sequence_id, 6, 0)])[0].code is (
        ResultCode.NOT_FOUND
    )
    for call in (
        lambda: manager.sequences.fork(TWO, held.sequence_id, 6, [""]),
        lambda: manager.sequences.truncate(TWO, held.sequence_id, 6, 5),
        lambda: manager.sequences.begin_attention(TWO, 0, [held.sequence_id], [6], [0]),
    ):
        with pytest.raises(SequenceNotFoundError):
            call()
    assert snapshot(manager.sequences) == before


def test_the_same_request_id_and_content_is_answered_again() -> None:
    manager = Manager(8)
    first = manager.allocate(T(6), request_id="q")
    before = snapshot(manager.sequences)
    again = manager.allocate(T(6), request_id="q")
    assert again == first
    assert snapshot(manager.sequences) == before


def test_a_repeat_gets_the_first_reply_though_the_cache_has_changed_since() -> None:
    manager = Manager(8)
    first = manager.allocate(T(9), request_id="q")
    manager.fill(T(8))
    assert manager.hit(T(9)) == 8
    assert manager.allocate(T(9), request_id="q") == first


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (T(7), {}),
        ([*T(5), 9], {}),
        (T(6), {"num_lookahead_tokens": 1}),
        (T(6), {"cache_use": CacheUse.NO_WRITE}),
        (T(6), {"full_hit": FullHit.LAST_BLOCK}),
        (T(6), {"extra_keys": ExtraKeys(cache_salt="s")}),
    ],
)
def test_the_same_request_id_with_other_content_is_a_conflict(tokens, options) -> None:
    manager = Manager(8)
    manager.allocate(T(6), request_id="q")
    refused(
        manager,
        RequestIdConflictError,
        lambda: manager.allocate(tokens, request_id="q", **options),
    )


def test_a_request_id_of_a_sequence_that_went_on_is_a_conflict() -> None:
    manager = Manager(8)
    held = manager.allocate(T(6), request_id="q")
    manager.commit(held)
    refused(manager, RequestIdConflictError, lambda: manager.allocate(T(6), request_id="q"))


def test_a_request_id_belongs_to_its_owner_and_is_free_after_free() -> None:
    manager = Manager(8)
    mine = manager.allocate(T(6), request_id="q")
    theirs = manager.allocate(U(6), owner=TWO, request_id="q")
    assert mine.sequence_id != theirs.sequence_id
    manager.free(mine)
    assert manager.allocate(C(6), request_id="q").sequence_id != mine.sequence_id


def test_a_fork_with_request_ids_is_repeated_and_not_made_twice() -> None:
    manager = Manager(8)
    parent = manager.allocate(T(6))
    manager.commit(parent)
    children = manager.fork(parent, request_ids=["a", "b"])
    before = snapshot(manager.sequences)
    assert manager.fork(parent, request_ids=["a", "b"]) == children
    assert snapshot(manager.sequences) == before
    refused(manager, RequestIdConflictError, lambda: manager.fork(parent, request_ids=["b", "c"]))


def test_a_fork_is_not_repeated_from_a_request_id_that_another_sequence_has_now() -> None:
    manager = Manager(8)
    parent = manager.allocate(T(6))
    manager.commit(parent)
    (child,) = manager.fork(parent, request_ids=["a"])
    manager.free(child)
    manager.allocate(U(4), request_id="a")
    refused(manager, RequestIdConflictError, lambda: manager.fork(parent, request_ids=["a"]))


def test_repeats_of_state_calls_are_answered_again_and_change_nothing() -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    commit = CommitRow(held.sequence_id, 0, 6)
    append = AppendRow(held.sequence_id, 6, np.array(U(5), dtype=np.uint32))
    calls = (
        lambda: manager.sequences.commit(ONE, [commit]),
        lambda: manager.sequences.append(ONE, [append]),
        lambda: manager.sequences.truncate(ONE, held.sequence_id, 11, 7),
    )
    for call in calls:
        first = call()
        before = snapshot(manager.sequences)
        assert call() == first
        assert snapshot(manager.sequences) == before


def test_only_the_last_applied_call_can_be_repeated() -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    manager.append(held, [7])
    manager.truncate(held, 6)
    assert manager.append(held, [7], start=6).code is ResultCode.OK
    assert manager.record(held).num_tokens == 7
    manager.commit(held)
    assert manager.append(held, [7], start=6).code is ResultCode.WRONG_POSITION


def test_commit_beyond_the_tokens_or_elsewhere_is_refused() -> None:
    manager = Manager(8)
    held = manager.allocate(T(6), num_lookahead_tokens=2)
    before = snapshot(manager.sequences)
    rows = [CommitRow(held.sequence_id, start, count) for start, count in ((0, 7), (1, 2))]
    codes = [row.code for row in manager.sequences.commit(ONE, rows)]
    assert codes == [ResultCode.BEYOND_TOKENS, ResultCode.WRONG_POSITION]
    assert snapshot(manager.sequences) == before


def test_sequences_of_a_silent_owner_expire_and_any_call_renews_all_of_them() -> None:
    manager = Manager(12, owner_ttl_s=10.0)
    mine = [manager.allocate(T(4)), manager.allocate(U(4))]
    theirs = manager.allocate(C(4), owner=TWO)
    manager.clock_s = 9.0
    manager.append(mine[0], [1])
    manager.clock_s = 10.0
    assert manager.sequences.expire() == 1
    assert manager.free(theirs) == [ResultCode.NOT_FOUND]
    manager.clock_s = 18.9
    assert manager.sequences.expire() == 0
    manager.clock_s = 19.0
    assert manager.sequences.expire() == 2
    assert manager.sequences.stats().referenced == 0
    assert manager.sequences.stats().owners == 0
    assert manager.sequences.stats().expired_sequences == 3


def test_a_refused_call_renews_its_owner_too() -> None:
    manager = Manager(4, owner_ttl_s=10.0)
    held = manager.allocate(T(4))
    manager.clock_s = 9.0
    assert manager.append(held, [1], start=1).code is ResultCode.WRONG_POSITION
    manager.clock_s = 18.0
    assert manager.sequences.expire() == 0


def test_a_dead_clients_half_of_the_pool_comes_back_with_its_ttl() -> None:
    manager = Manager(8, owner_ttl_s=10.0)
    manager.allocate(T(16))
    refused(manager, NoRoomError, lambda: manager.allocate(U(32), owner=TWO))
    manager.clock_s = 10.0
    manager.sequences.expire()
    assert len(manager.allocate(U(32), owner=TWO).table) == 8


def test_late_calls_on_an_expired_sequence_touch_no_new_owner() -> None:
    manager = Manager(2, owner_ttl_s=10.0, num_layers=1)
    late = manager.allocate(T(8))
    manager.clock_s = 10.0
    manager.sequences.expire()
    other = manager.allocate(U(8), owner=TWO)
    before = snapshot(manager.sequences)
    assert manager.free(late) == [ResultCode.NOT_FOUND]
    with pytest.raises(SequenceNotFoundError):
        manager.sequences.begin_attention(ONE, 0, [late.sequence_id], [0], [8])
    assert snapshot(manager.sequences) == before
    assert manager.table(other) == other.table


# ---- running calls


def test_a_freed_sequence_keeps_its_blocks_until_its_call_has_ended_and_commits_nothing() -> None:
    manager = Manager(4, num_layers=1)
    held = manager.allocate(T(8))
    ticket = manager.begin(0, held)
    assert manager.free(held) == [ResultCode.OK]
    assert manager.free(held) == [ResultCode.NOT_FOUND]
    assert manager.refs(held.table) == [1, 1]
    assert manager.sequences.stats().sequences == 0
    refused(manager, NoRoomError, lambda: manager.allocate(U(12), owner=TWO))
    manager.end(ticket)
    assert manager.pool.num_free == 4
    assert manager.pool.num_cached == 0


def test_a_sequence_with_calls_on_two_layers_goes_when_both_have_ended() -> None:
    manager = Manager(4, num_layers=2)
    held = manager.allocate(T(8))
    tickets = [manager.begin(layer, held) for layer in range(2)]
    manager.free(held)
    manager.end(tickets[0])
    assert manager.refs(held.table) == [1, 1]
    manager.end(tickets[1])
    assert manager.refs(held.table) == [0, 0]


def test_nothing_else_runs_on_a_sequence_while_its_call_runs() -> None:
    manager = Manager(8, num_layers=2)
    held = manager.allocate(T(8))
    manager.begin(0, held)
    before = snapshot(manager.sequences)
    assert manager.append(held, [1], start=8).code is ResultCode.BUSY
    (committed,) = manager.sequences.commit(ONE, [CommitRow(held.sequence_id, 0, 4)])
    assert committed.code is ResultCode.BUSY
    for call in (
        lambda: manager.begin(0, held),
        lambda: manager.fork(held),
        lambda: manager.truncate(held, 4),
    ):
        with pytest.raises(SequenceBusyError):
            call()
    assert snapshot(manager.sequences) == before
    manager.begin(1, held)


def test_one_bad_row_fails_the_whole_attention_call_before_anything_is_held() -> None:
    manager = Manager(8, num_layers=1)
    good, other = manager.allocate(T(4)), manager.allocate(U(4))
    theirs = manager.allocate(C(4), owner=TWO)

    def begin(ids: list[int], starts: list[int], counts: list[int]) -> None:
        manager.sequences.begin_attention(ONE, 0, ids, starts, counts)

    for error, ids, starts, counts in (
        (SequenceNotFoundError, [good.sequence_id, 777], [0, 0], [4, 4]),
        (SequenceNotFoundError, [good.sequence_id, theirs.sequence_id], [0, 0], [4, 4]),
        (InvalidArgumentError, [good.sequence_id, good.sequence_id], [0, 0], [2, 4]),
        (WrongPositionError, [good.sequence_id, other.sequence_id], [0, 1], [4, 3]),
        (PrefixCacheError, [good.sequence_id, other.sequence_id], [0, 0], [4, 5]),
    ):
        refused(manager, error, lambda ids=ids, s=starts, c=counts: begin(ids, s, c))
    begin([good.sequence_id, other.sequence_id], [0, 0], [4, 4])


def test_a_repeated_attention_call_writes_nothing_and_advances_nothing() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(8))
    manager.end(manager.begin(0, held, num_tokens=4))
    ticket = manager.sequences.begin_attention(ONE, 0, [held.sequence_id], [0], [4])
    (row,) = ticket.rows
    assert row.is_repeat
    assert row.first_writable == 4
    manager.end(ticket)
    assert manager.computed(held) == 4
    for start, count in ((0, 5), (2, 2), (5, 1)):
        with pytest.raises(WrongPositionError):
            manager.sequences.begin_attention(ONE, 0, [held.sequence_id], [start], [count])


def test_a_call_that_failed_before_it_wrote_can_be_made_again() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(8))
    manager.end(manager.begin(0, held), written=False)
    assert manager.computed(held) == 0
    assert manager.hit(T(8)) == 0
    manager.attend(held)
    assert manager.hit(T(8)) == 7


def test_an_owner_with_a_running_call_does_not_expire() -> None:
    manager = Manager(8, num_layers=1, owner_ttl_s=10.0)
    held, idle = manager.allocate(T(8)), manager.allocate(U(4))
    ticket = manager.begin(0, held)
    manager.clock_s = 100.0
    assert manager.sequences.expire() == 0
    manager.end(ticket)
    manager.clock_s = 109.0
    assert manager.sequences.expire() == 0, "the end of its call renewed it"
    manager.clock_s = 110.0
    assert manager.sequences.expire() == 2
    assert manager.free(idle) == [ResultCode.NOT_FOUND]


def test_a_sequence_that_is_being_copied_for_stays_still_until_the_copy_is_made() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    source = parent.table[1]
    manager.append(child, [70])
    ticket = manager.sequences.begin_copies(ONE, [child.sequence_id])
    assert ticket.copies == (BlockCopy(source, child.table[1]),)
    assert manager.append(child, [1], start=7).code is ResultCode.BUSY
    manager.free(child, parent)
    assert manager.refs([source, child.table[1]]) == [1, 1]
    manager.sequences.end_copies(ticket)
    check_invariants(manager.sequences)
    assert manager.pool.num_free == 8


# ---- reset


def test_reset_is_refused_while_blocks_are_referenced() -> None:
    manager = Manager(8)
    manager.fill(T(8))
    manager.allocate(U(4))
    error = refused(manager, BlocksInUseError, lambda: manager.sequences.reset(force=False))
    assert error.fields == {"referenced": 1}
    assert manager.hit(T(8)) == 7


def test_reset_of_an_idle_pool_drops_every_hash() -> None:
    manager = Manager(8)
    manager.fill(T(8))
    assert manager.sequences.reset(force=False) == 2
    assert manager.hit(T(8)) == 0
    stats = manager.sequences.stats()
    assert (stats.cached, stats.evictable, stats.blank, stats.resets) == (0, 0, 8, 1)
    assert stats.evictions == 0


def test_a_forced_reset_leaves_free_blocks_where_they_are() -> None:
    manager = Manager(8)
    manager.fill(T(8))
    manager.allocate(U(4), owner=TWO)
    before = manager.free_order()
    manager.sequences.reset(force=True)
    assert manager.free_order() == before
    check_invariants(manager.sequences)


def test_what_lived_at_a_forced_reset_never_registers_again_nor_do_its_forks() -> None:
    """The K/V in its blocks may be of the old weights."""
    manager = Manager(16)
    old = manager.allocate(T(6))
    manager.commit(old)
    manager.sequences.reset(force=True)
    assert manager.hit(T(6)) == 0
    (child,) = manager.fork(old)
    for held in (old, child):
        manager.append(held, U(6))
        manager.commit(held)
        assert manager.states(held.table) == [PLAIN, PLAIN, PLAIN]
    new = manager.allocate(T(6), owner=TWO)
    assert new.cached == 0
    manager.commit(new)
    assert manager.hit(T(6)) == 4


def test_what_lived_at_a_forced_reset_never_stands_by_for_new_content() -> None:
    manager = Manager(8)
    old = manager.allocate(T(4))
    manager.sequences.reset(force=True)
    manager.fill(T(4))
    manager.commit(old)
    assert manager.states(old.table) == [PLAIN]
    manager.free(old)
    assert manager.sequences.stats().evictable == 1


def test_a_call_that_runs_through_a_reset_registers_nothing() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(8))
    ticket = manager.begin(0, held)
    manager.sequences.reset(force=True)
    manager.end(ticket)
    assert manager.computed(held) == 8
    assert manager.hit(T(8)) == 0


# ---- counters


def test_rates_are_zero_without_traffic_and_right_after_a_reset() -> None:
    manager = Manager(8)
    assert manager.sequences.stats().hit_rate == 0.0
    assert manager.sequences.stats().pool_usage == 0.0
    manager.sequences.reset(force=False)
    assert manager.sequences.stats().hit_rate == 0.0


def test_a_hit_counts_once_a_sequence_when_allocate_succeeds() -> None:
    manager = Manager(6)
    manager.fill(T(8))
    blocker = manager.allocate(U(12), owner=TWO)
    before = manager.sequences.stats()
    for _ in range(5):
        with pytest.raises(NoRoomError):
            manager.allocate(T(8) + A(8))
        manager.hit(T(8))
    manager.free(blocker)
    manager.allocate(T(8) + A(8))
    stats = manager.sequences.stats()
    assert stats.queries_tokens - before.queries_tokens == 16
    assert stats.hit_tokens - before.hit_tokens == 8
    assert stats.queries_blocks - before.queries_blocks == 4
    assert stats.hit_blocks - before.hit_blocks == 2
    assert stats.allocation_refused == 5


def test_reported_cached_tokens_are_the_ones_not_computed() -> None:
    manager = Manager(12)
    manager.fill(T(8))
    before = manager.sequences.stats()
    for cache_use, cached in ((CacheUse.READ_WRITE, 7), (CacheUse.NO_READ, 0)):
        held = manager.allocate(T(8), cache_use=cache_use)
        assert held.cached == cached
        manager.commit(held)
        manager.free(held)
    stats = manager.sequences.stats()
    assert stats.hit_tokens - before.hit_tokens == 7
    assert stats.prefill_tokens_cached - before.prefill_tokens_cached == 7
    assert stats.prefill_tokens_computed - before.prefill_tokens_computed == 1 + 8


def test_a_resumed_request_has_counters_of_its_own() -> None:
    manager = Manager(8)
    held = manager.allocate(T(9), request_id="q")
    manager.commit(held)
    manager.free(held)
    assert manager.allocate(T(9), request_id="q", resumed=True).cached == 8
    stats = manager.sequences.stats()
    assert (stats.hit_rate, stats.queries_tokens, stats.requests) == (0.0, 9, 1)
    assert (stats.resumed_requests, stats.resumed_queries_tokens) == (1, 9)
    assert stats.resumed_hit_tokens == 8


def test_a_prompt_that_was_cut_is_not_computed_twice_in_the_counters() -> None:
    manager = Manager(8)
    held = manager.allocate(T(8))
    manager.commit(held)
    manager.truncate(held, 2)
    manager.append(held, U(6))
    manager.commit(held)
    assert manager.sequences.stats().prefill_tokens_computed == 8


def test_usage_counts_referenced_blocks_and_cached_free_ones_apart() -> None:
    manager = Manager(8)
    held = manager.allocate(T(16))
    manager.commit(held)
    assert manager.sequences.stats().pool_usage == 0.5
    manager.free(held)
    stats = manager.sequences.stats()
    assert (stats.pool_usage, stats.evictable, stats.blank) == (0.0, 4, 4)


def test_slots_written_show_what_half_empty_blocks_hide() -> None:
    manager = Manager(200, 16)
    for number in range(100):
        held = manager.allocate([number] * 17)
        manager.commit(held)
    stats = manager.sequences.stats()
    assert stats.referenced * stats.block_size == 3200
    assert stats.slots_written == 1700


def test_slots_of_shared_blocks_count_once_and_a_copys_source_by_its_table() -> None:
    manager = Manager(8)
    _, child = forked(manager)
    assert manager.sequences.stats().slots_written == 6
    manager.append(child, [7])
    assert manager.sequences.stats().slots_written == 8
    manager.commit(child)
    assert manager.sequences.stats().slots_written == 9


def test_refused_appends_have_a_counter_of_their_own() -> None:
    manager = Manager(2)
    held = manager.allocate(T(8))
    manager.append(held, [1], start=8)
    manager.append(held, [1], start=7)
    stats = manager.sequences.stats()
    assert (stats.appends_refused, stats.allocation_refused) == (1, 0)


def test_sequences_are_listed_in_pages_oldest_first() -> None:
    manager = Manager(16)
    held = [manager.allocate(T(number + 1)) for number in range(5)]
    manager.free(held[1])
    first = manager.sequences.live.list_after(0, 2)
    rest = manager.sequences.live.list_after(first[-1].serial, 10)
    assert [info.sequence_id for info in (*first, *rest)] == [
        held[number].sequence_id for number in (0, 2, 3, 4)
    ]
    assert [info.num_tokens for info in rest] == [4, 5]


# ---- hash seeds


def test_managers_of_one_seed_agree_on_hashes_and_those_without_do_not() -> None:
    tokens = np.array(T(8), dtype=np.uint32)

    def hashes(seed: str | None) -> list[bytes]:
        hasher = Hasher(HASH_ALGORITHMS["xxhash_cbor"], seed, 4)
        return list(hasher.chain(None, tokens, ExtraKeys()).hashes)

    assert hashes("one seed") == hashes("one seed")
    assert hashes("one seed") != hashes("another")
    assert hashes(None) != hashes(None)
