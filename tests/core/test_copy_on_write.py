"""Fork, Truncate, and the copies that Append makes for them."""

from __future__ import annotations

import pytest

from prefixcache.core.pool import REGISTERED, STANDBY
from prefixcache.errors import InvalidArgumentError, NotComputedError
from prefixcache.types import BlockCopy, CacheUse, ExtraKeys, Lora, ResultCode
from tests.core.manager import TWO, Manager, T, U, forked, refused
from tests.support.invariants import snapshot


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


def test_a_full_hit_that_is_cut_writes_the_tokens_that_come_then() -> None:
    manager = Manager(8)
    manager.fill(T(8))
    held = manager.allocate(T(8))
    manager.truncate(held, 6)
    assert len(manager.append(held, [70, 80]).copies) == 1
    (row,) = manager.begin(0, held).rows
    assert (row.start_position, row.num_tokens, row.first_writable) == (6, 2, 6)


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
    keys = ExtraKeys(Lora("a"), cache_salt="s")
    held = manager.allocate(T(6), keys)
    manager.commit(held)
    (child,) = manager.fork(held)
    manager.append(child, [7, 8])
    manager.commit(child)
    assert manager.hit(T(9), keys) == 8
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
