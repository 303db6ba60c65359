"""Several holders of one content: one registered block a hash."""

from __future__ import annotations

import pytest

from prefixcache.core.pool import PLAIN, REGISTERED, STANDBY
from prefixcache.types import CacheUse
from tests.core.manager import TWO, Held, Manager, T, U


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


@pytest.mark.parametrize("verify_hits", [False, True])
def test_the_second_copy_takes_over_when_the_first_is_evicted_and_no_eviction_counts(
    verify_hits: bool,
) -> None:
    manager = Manager(4, verify_hits=verify_hits)
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
