"""Counters and gauges."""

from __future__ import annotations

import pytest

from prefixcache.errors import NoRoomError
from prefixcache.types import CacheUse, SequenceOrder
from tests.core.manager import TWO, A, Manager, T, U, forked


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
    assert (stats.append_refused, stats.allocation_refused) == (1, 0)


def test_sequences_are_listed_in_pages_oldest_first() -> None:
    manager = Manager(16)
    held = [manager.allocate(T(number + 1)) for number in range(5)]
    manager.free(held[1])
    first = manager.sequences.listings.sequences_after(0, 2)
    rest = manager.sequences.listings.sequences_after(first[-1].serial, 10)
    assert [info.sequence_id for info in (*first, *rest)] == [
        held[number].sequence_id for number in (0, 2, 3, 4)
    ]
    assert [info.num_tokens for info in rest] == [4, 5]


def test_sequences_are_listed_by_blocks_and_the_newest_first() -> None:
    manager = Manager(16)
    listings = manager.sequences.listings
    held = [manager.allocate(T(length)) for length in (1, 9, 5, 8, 2)]

    def first(order: SequenceOrder, count: int) -> list[int]:
        ids = [sequence.sequence_id for sequence in held]
        return [ids.index(info.sequence_id) for info in listings.first_sequences(order, count)]

    assert first(SequenceOrder.MOST_BLOCKS, 4) == [1, 2, 3, 0]
    assert first(SequenceOrder.NEWEST, 2) == [4, 3]
    assert first(SequenceOrder.OLDEST, 2) == [0, 1]
    for order in SequenceOrder:
        assert sorted(first(order, 100)) == [0, 1, 2, 3, 4]
        assert first(order, 0) == []
