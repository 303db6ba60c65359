"""Which block goes next, and what a reused block leaves behind."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np

from prefixcache.core.sequence import CommitRow
from prefixcache.errors import NoRoomError
from prefixcache.types import ExtraKeys
from tests.core.manager import ONE, TWO, A, C, Held, Manager, T, U, refused, room


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
    assert room(error) == {"needed": 2, "free": 1, "referenced": 3}
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
            manager.sequences.rows.commit(ONE, [CommitRow(held.sequence_id, 0, 4)])
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
