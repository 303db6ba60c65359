"""Places that tenants share: nobody takes another's share, and nothing is left unused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.core.sessions import SessionLimits
from prefixcache.core.shares import Shares
from prefixcache.core.tenants import TenantQuota
from prefixcache.errors import TooManyOwnersError, TooManySessionsError
from prefixcache.types import NO_EXTRA_KEYS
from tests.core.manager import Manager, U, refused

TENANTS = "abcd"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "remove"]), st.sampled_from(TENANTS)),
        st.tuples(st.just("among"), st.sets(st.sampled_from(TENANTS))),
    ),
    max_size=60,
)


@given(st.integers(1, 9), STEPS)
def test_a_share_is_firm_and_the_rest_is_whose_it_is_first(limit: int, steps: list) -> None:
    shares, held = Shares(limit), Counter[str]()
    among: set[str] = set()
    for step, what in steps:
        if step == "among":
            among = what
            shares.share_among(among)
        elif step == "remove" and held[what]:
            shares.remove(what)
            held[what] -= 1
        elif step == "add":
            share = limit // max(1, len(among))
            lacking = sum(max(0, share - held[other]) for other in among - {what})
            assert shares.has_place(what) == (held.total() + lacking < limit)
            if shares.has_place(what):
                shares.add(what)
                held[what] += 1
        assert held.total() <= limit


def test_with_one_tenant_or_none_all_places_are_its() -> None:
    for among in ([], ["a"]):
        shares = Shares(3)
        shares.share_among(among)
        for _ in range(3):
            assert shares.has_place("a")
            shares.add("a")
        assert not shares.has_place("a")


@pytest.fixture
def manager() -> Manager:
    made = Manager(16, session_limits=SessionLimits(max_sessions=4, max_owners=4))
    made.sequences.set_tenants([TenantQuota("a", "a"), TenantQuota("b", "b")])
    return made


def test_a_tenant_cannot_take_the_sessions_of_another(manager: Manager) -> None:
    def opened(tenant: str) -> bytes:
        return manager.sequences.live.sessions.open(10.0, "", "", tenant).session_id

    first = [opened("a") for _ in range(2)]
    refused(manager, TooManySessionsError, lambda: opened("a"))
    second = [opened("b") for _ in range(2)]
    refused(manager, TooManySessionsError, lambda: opened("b"))
    manager.sequences.live.close_session(first[0])
    refused(manager, TooManySessionsError, lambda: opened("b"))
    manager.sequences.set_tenants([TenantQuota("b", "b")])
    opened("b")
    for session_id in second:
        manager.sequences.live.close_session(session_id)
    assert [opened("b") for _ in range(2)]
    refused(manager, TooManySessionsError, lambda: opened("b"))


def test_a_tenant_cannot_take_the_owners_of_another(manager: Manager) -> None:
    def allocate(owner: str, account: int) -> int:
        prompt = manager.sequences.prepare(np.array(U(1), dtype=np.uint32), NO_EXTRA_KEYS)
        name = owner.encode().ljust(16)
        return manager.sequences.allocate(name, "", prompt, account=account).sequence_id

    kept = [allocate("a1", 1), allocate("a2", 1)]
    refused(manager, TooManyOwnersError, lambda: allocate("a3", 1))
    allocate("a1", 1)  # an owner that is there already
    assert allocate("b1", 2)
    assert allocate("b2", 2)
    refused(manager, TooManyOwnersError, lambda: allocate("b3", 2))
    manager.sequences.free(b"a2".ljust(16), [kept[1]])
    refused(manager, TooManyOwnersError, lambda: allocate("b3", 2))
    assert allocate("a3", 1)
