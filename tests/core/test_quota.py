"""Tenants' quotas: guaranteed blocks, borrowing while there is room, who loses blocks first."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from prefixcache.core.stats import TenantStats
from prefixcache.core.tenants import NO_TENANT, TenantQuota
from prefixcache.errors import (
    InvalidArgumentError,
    NoRoomError,
    PrefixCacheError,
    QuotaExceededError,
)
from prefixcache.types import CacheUse, ResultCode
from tests.core.manager import ONE, TWO, A, C, Held, Manager, T, U, refused

B = 4
"""Tokens of a block."""


def manager_with(num_blocks: int, *quotas: TenantQuota) -> Manager:
    manager = Manager(num_blocks, B)
    manager.sequences.tenants.apply(quotas)
    return manager


def quota(
    name: str, guaranteed: int = 0, limit: int | None = None, namespace: str | None = None
) -> TenantQuota:
    """In a namespace of its own, if none is given."""
    return TenantQuota(name, name if namespace is None else namespace, guaranteed, limit)


def account_of(manager: Manager, name: str) -> int:
    namespaces = {one.name: one.namespace for one in manager.sequences.tenants.stats()}
    return manager.sequences.tenants.account_of(name, namespaces[name])


def take(manager: Manager, name: str, tokens: list[int]) -> Held:
    return manager.allocate(tokens, account=account_of(manager, name))


def fill(manager: Manager, name: str, tokens: list[int]) -> None:
    """Leave the prompt's blocks cached."""
    held = take(manager, name, tokens)
    manager.commit(held)
    manager.free(held)


def cached(manager: Manager, tokens: list[int]) -> int:
    return manager.lookup([*tokens, 0]).num_cached_blocks


def use(manager: Manager, name: str) -> TenantStats:
    return next(one for one in manager.sequences.tenants.stats() if one.name == name)


def available(manager: Manager, name: str) -> int:
    return manager.pool.num_available(account_of(manager, name))


# ---- guarantees


def test_without_tenants_no_accounts_are_kept() -> None:
    manager = Manager(4, B)
    manager.allocate(T(B))
    assert not manager.pool.keeps_accounts
    assert manager.sequences.tenants.stats() == ()
    assert manager.pool.num_available() == 3


def test_a_tenant_borrows_all_that_is_not_guaranteed_to_others_and_no_more() -> None:
    manager = manager_with(10, quota("a", 4), quota("b"))
    held = take(manager, "b", T(2 * B))
    take(manager, "b", C(4 * B))
    error = refused(manager, NoRoomError, lambda: take(manager, "b", U(B)))
    numbers = {"needed": 1, "free": 0, "referenced": 6}
    assert error.fields | numbers == error.fields
    assert manager.append(held, [1]).code is ResultCode.NO_ROOM
    take(manager, "a", A(4 * B))
    refused(manager, NoRoomError, lambda: take(manager, "a", U(1)))


def test_what_a_tenant_borrows_beyond_its_guarantee_is_gone_for_others() -> None:
    manager = manager_with(10, quota("a", 2), quota("b", 3))
    take(manager, "a", A(6 * B))
    assert (available(manager, "a"), available(manager, "b")) == (1, 4)
    take(manager, "b", U(4 * B))
    assert (available(manager, "a"), available(manager, "b")) == (0, 0)


def test_what_comes_back_is_there_for_all_again() -> None:
    manager = manager_with(10, quota("a", 4), quota("b"))
    borrowed = take(manager, "a", A(9 * B))
    assert available(manager, "b") == 1
    manager.free(borrowed)
    assert available(manager, "b") == 6


def test_everything_without_a_tenant_is_one_more_account() -> None:
    manager = manager_with(10, quota("a", 4))
    assert manager.sequences.tenants.account_of(NO_TENANT, NO_TENANT) == 0
    manager.allocate(T(6 * B))
    refused(manager, NoRoomError, lambda: manager.allocate(U(1)))
    take(manager, "a", A(4 * B))


def test_lookup_says_what_a_tenant_could_have() -> None:
    manager = manager_with(10, quota("a", 4), quota("b", 0, 5))
    a, b = (account_of(manager, name) for name in "ab")
    found = manager.lookup(T(7 * B), account=b)
    assert (found.num_blocks_needed, found.num_blocks_free) == (7, 5)
    found = manager.lookup(T(7 * B), account=a)
    assert (found.num_blocks_needed, found.num_blocks_free) == (7, 10)
    take(manager, "b", T(3 * B))
    found = manager.lookup(U(3 * B), account=b)
    assert (found.num_blocks_needed, found.num_blocks_free) == (3, 2)


# ---- who loses blocks first


def test_caches_fill_the_whole_pool_and_give_way_to_a_guarantee() -> None:
    manager = manager_with(8, quota("a", 4), quota("b"))
    for first in range(8):
        fill(manager, "b", [100 + first] * B)
    assert use(manager, "b").evictable == 8
    take(manager, "a", A(4 * B))
    assert [cached(manager, [100 + first] * B) for first in range(8)] == [0] * 4 + [1] * 4
    assert use(manager, "b").evictions == 4


def test_a_tenant_within_its_guarantee_loses_cached_blocks_only_to_itself() -> None:
    manager = manager_with(8, quota("a", 4), quota("b"))
    fill(manager, "a", A(3 * B))
    for first in range(20):
        fill(manager, "b", [100 + first] * B)
    assert cached(manager, A(3 * B)) == 3
    assert (use(manager, "a").evictions, use(manager, "b").evictions) == (0, 15)
    held = take(manager, "b", U(4 * B))
    assert cached(manager, A(3 * B)) == 3
    take(manager, "a", C(2 * B))
    assert (use(manager, "a").evictions, held.table) == (1, manager.table(held))
    assert cached(manager, A(3 * B)) == 2


def test_the_tenant_over_its_guarantee_loses_first_though_its_blocks_were_used_last() -> None:
    manager = manager_with(8, quota("a", 3), quota("b", 1), quota("c", 4))
    fill(manager, "a", A(3 * B))
    for first in range(5):
        fill(manager, "b", [100 + first] * B)
    take(manager, "c", C(4 * B))
    assert cached(manager, A(3 * B)) == 3
    assert [cached(manager, [100 + first] * B) for first in range(5)] == [0, 0, 0, 0, 1]


def test_among_tenants_over_their_guarantees_the_least_recently_used_block_goes() -> None:
    manager = manager_with(6, quota("a", 1), quota("b", 1), quota("c"))
    for first in range(3):
        fill(manager, "a", [100 + first] * B)
        fill(manager, "b", [200 + first] * B)
    manager.free(take(manager, "c", C(3 * B)))
    assert [cached(manager, [100 + first] * B) for first in range(3)] == [0, 0, 1]
    assert [cached(manager, [200 + first] * B) for first in range(3)] == [0, 1, 1]


def test_the_taker_loses_too_if_it_is_over_its_guarantee() -> None:
    manager = manager_with(4, quota("a", 1), quota("b"))
    fill(manager, "a", A(2 * B))
    fill(manager, "b", U(2 * B))
    manager.free(take(manager, "a", C(B)))
    assert (cached(manager, A(2 * B)), cached(manager, U(2 * B))) == (1, 2)


def test_many_blocks_at_once_come_from_each_tenant_down_to_its_guarantee() -> None:
    manager = manager_with(12, quota("a", 2), quota("b", 3), quota("c", 6))
    for first in range(5):
        fill(manager, "a", [100 + first] * B)
        fill(manager, "b", [200 + first] * B)
    take(manager, "c", C(7 * B))
    assert (use(manager, "a").evictable, use(manager, "b").evictable) == (2, 3)


# ---- a namespace that tenants share


def test_a_hit_by_another_tenant_moves_no_charge_until_the_first_one_lets_go() -> None:
    manager = manager_with(8, quota("a", 0, None, "n"), quota("b", 0, None, "n"))
    first = take(manager, "a", T(2 * B))
    manager.commit(first)
    second = take(manager, "b", T(2 * B))
    assert second.table == first.table
    assert (use(manager, "a").held, use(manager, "b").held) == (2, 2)
    assert [manager.pool.account(number).private for number in (1, 2)] == [0, 0]
    manager.free(first)
    assert (use(manager, "a").held, use(manager, "b").held) == (0, 2)
    assert [manager.pool.account(number).private for number in (1, 2)] == [0, 2]
    manager.free(second)
    assert (use(manager, "a").evictable, use(manager, "b").evictable) == (0, 2)


def test_tenants_without_guarantees_share_more_than_half_of_the_pool() -> None:
    manager = manager_with(4, quota("a", 0, None, "n"), quota("b", 0, None, "n"))
    manager.commit(take(manager, "a", T(3 * B)))
    shared = take(manager, "b", T(4 * B))
    assert shared.cached == 3 * B
    assert manager.pool.num_free == 0


def test_what_cannot_be_reserved_as_shared_is_computed_again_in_blocks_of_ones_own() -> None:
    """All of the pool is guaranteed: were these two blocks shared, "a" could have 2 more."""
    manager = manager_with(8, quota("a", 4, None, "n"), quota("b", 4, None, "n"))
    first = take(manager, "a", T(2 * B))
    manager.commit(first)
    found = manager.lookup(T(2 * B + 1), account=2)
    assert (found.num_cached_blocks, found.num_blocks_needed, found.num_blocks_free) == (0, 3, 4)
    own = take(manager, "b", T(2 * B + 1))
    assert own.cached == 0
    manager.commit(own)
    take(manager, "a", A(2 * B))
    take(manager, "b", U(B))
    assert (available(manager, "a"), available(manager, "b")) == (0, 0)


def test_of_a_prefix_as_much_is_shared_as_can_be_reserved() -> None:
    """Two of "a"s blocks are borrowed, and reserved already."""
    manager = manager_with(8, quota("a", 2, None, "n"), quota("b", 4, None, "n"))
    manager.commit(take(manager, "a", T(4 * B)))
    found = manager.lookup(T(4 * B), account=2)
    assert (found.num_cached_blocks, found.num_blocks_needed, found.num_blocks_free) == (2, 2, 4)
    held = take(manager, "b", T(4 * B))
    assert (held.cached, available(manager, "b")) == (2 * B, 2)


def test_no_parent_goes_before_a_child_that_another_tenant_was_charged_for() -> None:
    """ "b" lets go of the deep block first, "a" of its parent later, and "a" is over."""
    manager = manager_with(5, quota("a", 0, None, "n"), quota("b", 4, None, "n"))
    parent = take(manager, "a", T(B))
    manager.commit(parent)
    child = take(manager, "b", T(2 * B))
    manager.commit(child)
    manager.free(child)
    manager.free(parent)
    manager.free(take(manager, "b", U(4 * B)))
    assert cached(manager, T(2 * B)) == 1


def test_blocks_of_one_tenant_that_forks_are_held_once() -> None:
    manager = manager_with(8, quota("a", 0, 4), quota("b"))
    parent = take(manager, "a", T(3 * B))
    manager.commit(parent)
    (child,) = manager.fork(parent)
    assert use(manager, "a").held == 3
    manager.free(parent)
    assert use(manager, "a").held == 3
    assert manager.append(child, U(B)).code is ResultCode.OK
    assert manager.append(child, U(B)).code is ResultCode.QUOTA_EXCEEDED


# ---- limits


def test_a_tenant_holds_no_more_than_its_limit() -> None:
    manager = manager_with(10, quota("a", 0, 4), quota("b"))
    held = take(manager, "a", T(3 * B))
    error = refused(manager, QuotaExceededError, lambda: take(manager, "a", U(2 * B)))
    assert error.fields == {"needed": 2, "held": 3, "max": 4}
    assert isinstance(error, QuotaExceededError) and not error.is_permanent
    assert manager.append(held, U(B)).code is ResultCode.OK
    assert manager.append(held, U(B)).code is ResultCode.QUOTA_EXCEEDED
    assert use(manager, "a").refused == 2
    manager.free(held)
    take(manager, "a", U(4 * B))


def test_hits_on_blocks_of_others_count_to_the_limit() -> None:
    manager = manager_with(10, quota("a", 0, None, "n"), quota("b", 0, 2, "n"))
    manager.commit(take(manager, "a", T(3 * B)))
    error = refused(manager, QuotaExceededError, lambda: take(manager, "b", T(3 * B)))
    assert isinstance(error, QuotaExceededError) and error.is_permanent
    take(manager, "b", T(2 * B))
    refused(manager, QuotaExceededError, lambda: take(manager, "b", U(B)))


def test_a_limit_reached_by_hits_alone_shows_in_the_dry_run() -> None:
    manager = manager_with(10, quota("a", 0, None, "n"), quota("b", 0, 2, "n"))
    manager.commit(take(manager, "a", T(2 * B)))
    take(manager, "b", U(B))
    found = manager.lookup(T(2 * B), account=2)
    assert found.num_blocks_needed > found.num_blocks_free
    refused(manager, QuotaExceededError, lambda: take(manager, "b", T(2 * B)))


def test_a_prompt_that_the_guarantees_of_others_leave_no_room_for_is_refused_for_good() -> None:
    manager = manager_with(10, quota("a", 6), quota("b"))
    error = refused(manager, QuotaExceededError, lambda: take(manager, "b", T(5 * B)))
    assert error.fields == {"needed": 5, "held": 0, "max": 4}
    assert isinstance(error, QuotaExceededError) and error.is_permanent


def test_what_is_held_above_a_lowered_limit_stays_and_does_not_grow() -> None:
    manager = manager_with(10, quota("a"))
    held = take(manager, "a", T(3 * B + 1))
    manager.sequences.tenants.apply([quota("a", 0, 2)])
    assert manager.append(held, [7]).code is ResultCode.OK
    assert manager.append(held, U(B)).code is ResultCode.QUOTA_EXCEEDED
    assert manager.table(held) == held.table


# ---- changes at run time


def test_a_raised_guarantee_waits_for_what_others_have_borrowed() -> None:
    manager = manager_with(8, quota("a"), quota("b"))
    borrowed = take(manager, "b", T(6 * B))
    small = take(manager, "b", U(B))
    manager.sequences.tenants.apply([quota("a", 5), quota("b")])
    assert manager.pool.num_unreserved() == -4
    assert (available(manager, "a"), available(manager, "b")) == (1, 0)
    manager.free(small)
    refused(manager, NoRoomError, lambda: take(manager, "b", U(B)))
    take(manager, "a", A(2 * B))
    manager.free(borrowed)
    assert (available(manager, "a"), available(manager, "b")) == (3 + 3, 3)


def test_guarantees_change_places_though_the_pool_is_promised_to_the_last_block() -> None:
    manager = manager_with(8, quota("a", 8), quota("b", 0, 3))
    manager.sequences.tenants.apply([quota("a", 0, 3), quota("b", 8)])
    assert (available(manager, "a"), available(manager, "b")) == (0, 8)


def test_a_tenant_that_is_gone_keeps_its_blocks_without_a_guarantee() -> None:
    manager = manager_with(8, quota("a", 4, 4), quota("b"))
    held = take(manager, "a", T(2 * B))
    fill(manager, "a", A(2 * B))
    manager.sequences.tenants.apply([quota("b")])
    with pytest.raises(KeyError):
        account_of(manager, "c")
    assert use(manager, "a") == TenantStats("a", "a", 0, None, 2, 2, 0, 0)
    take(manager, "b", U(6 * B))
    assert manager.append(held, [1]).code is ResultCode.NO_ROOM
    manager.sequences.tenants.apply([quota("a", 2), quota("b")])
    assert use(manager, "a").held == 2


def test_the_first_tenants_may_come_to_a_pool_in_use() -> None:
    manager = Manager(8, B)
    manager.fill(T(3 * B))
    held = manager.allocate(U(2 * B))
    manager.sequences.tenants.apply([quota("a", 4), quota("b")])
    assert use(manager, NO_TENANT) == TenantStats(NO_TENANT, NO_TENANT, 0, None, 2, 3, 0, 0)
    take(manager, "a", A(4 * B))
    assert cached(manager, T(3 * B)) == 2
    manager.free(held)
    assert (use(manager, NO_TENANT).held, use(manager, NO_TENANT).evictable) == (0, 2)


def test_a_tenant_in_another_namespace_is_another_tenant() -> None:
    manager = manager_with(8, quota("a", 4, None, "m"))
    tenants = manager.sequences.tenants
    tenants.apply([quota("a", 4, None, "n")])
    before, after = (tenants.account_of("a", namespace) for namespace in "mn")
    assert manager.pool.account(before).guaranteed == 0
    assert manager.pool.account(after).guaranteed == 4


@pytest.mark.parametrize(
    ("quotas", "field", "problem"),
    [
        ([quota("a", 5), quota("b", 4)], "tenants", "guarantee 9 blocks together"),
        ([quota("a", -1)], "guaranteed_blocks", "is -1, must be 0 or more"),
        ([quota("a", 0, 0)], "max_blocks", "must be at least 1"),
        ([quota("a", 3, 2)], "max_blocks", "at least its guaranteed_blocks"),
        ([quota("a"), quota("a", 1)], "tenants", "'a' is there twice"),
        ([quota(str(number)) for number in range(1024)], "tenants", "more than 1024"),
    ],
)
def test_quotas_that_cannot_be_kept_are_refused_and_change_nothing(
    quotas: list[TenantQuota], field: str, problem: str
) -> None:
    manager = manager_with(8, quota("a", 2))
    error = refused(manager, InvalidArgumentError, lambda: manager.sequences.tenants.apply(quotas))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert problem in error.message


def test_a_forced_reset_leaves_charges_of_referenced_blocks_alone() -> None:
    manager = manager_with(8, quota("a", 2), quota("b"))
    fill(manager, "b", U(3 * B))
    held = take(manager, "a", A(B))
    manager.sequences.reset(force=True)
    assert (use(manager, "a").held, use(manager, "b").evictable) == (1, 0)
    assert manager.pool.num_blank == 7
    take(manager, "a", C(7 * B))
    manager.free(held)


# ---- whatever others do


class Adversary:
    """Does anything with other tenants' names, to have as many blocks as it can."""

    def __init__(self, manager: Manager, rng: random.Random) -> None:
        self._manager = manager
        self._rng = rng
        self._held: list[Held] = []

    def act(self) -> None:
        rng, manager = self._rng, self._manager
        kind = rng.choice(("allocate",) * 4 + ("append", "append", "fork", "free", "truncate"))
        with suppress(PrefixCacheError):
            if kind == "allocate":
                tokens = rng.choice((T, U, A))(rng.randrange(1, 6 * B))
                held = manager.allocate(
                    tokens,
                    owner=TWO,
                    account=account_of(manager, rng.choice("bc")),
                    cache_use=rng.choice((CacheUse.READ_WRITE, CacheUse.NONE)),
                )
                self._held.append(held)
                manager.commit(held)
            elif self._held and kind == "append":
                held = rng.choice(self._held)
                manager.append(held, C(rng.randrange(1, 2 * B)))
                manager.commit(held)
            elif self._held and kind == "fork":
                self._held += manager.fork(rng.choice(self._held), 2)
            elif self._held and kind == "truncate":
                held = rng.choice(self._held)
                manager.truncate(held, rng.randrange(1, held.num_tokens + 1))
            elif self._held:
                manager.free(self._held.pop(rng.randrange(len(self._held))))


@pytest.mark.parametrize("seed", range(40))
def test_a_tenant_has_its_guarantee_whatever_others_do(seed: int) -> None:
    """One of the others shares its namespace, and its prompts."""
    rng = random.Random(seed)
    num_blocks = rng.randrange(8, 20)
    guaranteed = rng.randrange(1, num_blocks - 2)
    others = rng.randrange(num_blocks - guaranteed)
    manager = manager_with(
        num_blocks,
        quota("a", guaranteed, None, "n"),
        quota("b", others, None, "n"),
        quota("c"),
    )
    adversary = Adversary(manager, rng)
    mine: list[Held] = []
    for _ in range(60):
        adversary.act()
        left = guaranteed - use(manager, "a").held
        if left > 0 and rng.randrange(3) == 0:
            num_tokens = rng.randrange(1, left * B + 1)
            mine.append(take(manager, "a", rng.choice((T, U, A))(num_tokens)))
            assert mine[-1].owner == ONE
            manager.commit(mine[-1])
        elif mine and rng.randrange(2):
            manager.free(mine.pop(rng.randrange(len(mine))))
