"""Room, refusals and the order of taking in Allocate."""

from __future__ import annotations

from prefixcache.errors import ExceedsPoolError, NoRoomError
from tests.core.manager import TWO, A, C, Manager, T, U, refused, room


def test_hits_are_held_before_new_blocks_are_taken() -> None:
    """The hits stand at the head of the free queue, where new blocks come from."""
    manager = Manager(4)
    cached, others = manager.fill(T(8)), manager.fill(C(8))
    assert manager.free_order() == [*cached[::-1], *others[::-1]]
    held = manager.allocate(T(8) + A(8))
    assert held.cached == 8
    assert held.table == [*cached, *others[::-1]]
    assert manager.hit([*T(8), 1]) == 8
    assert manager.sequences.stats().evictions == 2


def test_room_does_not_count_free_blocks_that_are_about_to_be_hits() -> None:
    """Nor does the refusal make the hits young: a younger prompt stands behind them."""
    manager = Manager(7)
    manager.fill(T(8))
    manager.fill(C(4))
    manager.allocate(U(1), owner=TWO)
    error = refused(manager, NoRoomError, lambda: manager.allocate(T(8) + A(20)))
    assert room(error) == {"needed": 7, "free": 6, "referenced": 1}
    assert manager.allocate(T(8) + A(16)).cached == 8


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
    assert room(error) == {"needed": 1, "free": 0, "referenced": 3}


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
