"""Reset drops every hash, and what lived through it never registers."""

from __future__ import annotations

from prefixcache.core.pool import PLAIN
from prefixcache.errors import BlocksInUseError
from tests.core.manager import TWO, Manager, T, U, refused
from tests.support.invariants import check_invariants


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
