"""Tenants take turns, and none waits behind more than one of another's at a time."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.server.fair_queue import FairQueue
from prefixcache.server.places import Places

STEPS = st.lists(st.one_of(st.sampled_from("abc"), st.none()), max_size=60)


def queue(limit: int = 1000) -> FairQueue[tuple[str, int]]:
    return FairQueue(Places(limit))


def test_tenants_take_turns_and_each_ones_work_stays_in_order() -> None:
    waiting = queue()
    for name, count in (("a", 4), ("b", 2), ("c", 1)):
        for number in range(count):
            assert waiting.put(name, (name, number))
    order = [waiting.take() for _ in range(len(waiting))]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]


@given(STEPS)
def test_one_piece_of_another_tenant_goes_ahead_at_most(steps: list[str | None]) -> None:
    """steps: whose work comes; None takes a piece."""
    waiting, came, overtaken = queue(), 0, dict[tuple[str, int], dict[str, int]]()
    for name in steps:
        if name is not None:
            waiting.put(name, (name, came))
            overtaken[name, came] = defaultdict(int)
            came += 1
        elif len(waiting):
            first = waiting.first()
            taken = waiting.take()
            assert taken == first
            assert taken[1] == min(number for name, number in overtaken if name == taken[0])
            del overtaken[taken]
            own_first = {name: min(n for o, n in overtaken if o == name) for name, _ in overtaken}
            for name, number in own_first.items():
                overtaken[name, number][taken[0]] += name != taken[0]
                assert overtaken[name, number][taken[0]] <= 1
        assert len(waiting) == len(overtaken)


def test_what_is_late_leaves_the_rest_in_turn() -> None:
    waiting = queue()
    for name, number in (("a", 1), ("b", 5), ("a", 2), ("b", 6), ("a", 7)):
        waiting.put(name, (name, number))
    assert waiting.take_late(lambda work: work[1] <= 2) == [("a", 1), ("a", 2)]
    assert waiting.take_late(lambda work: work[1] <= 2) == []
    assert [waiting.take() for _ in range(len(waiting))] == [("a", 7), ("b", 5), ("b", 6)]
    assert not waiting


def test_a_place_is_free_again_once_its_work_was_taken() -> None:
    waiting = queue(limit=2)
    assert [waiting.put("a", ("a", number)) for number in range(3)] == [True, True, False]
    waiting.take()
    assert waiting.put("b", ("b", 3))
    assert not waiting.put("b", ("b", 4))
    assert len(waiting.take_late(lambda work: True)) == 2
    assert waiting.put("b", ("b", 5))
