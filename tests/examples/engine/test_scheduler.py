"""What is computed next, and who waits, case by case. Blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from examples.engine.loop import EngineFullError
from examples.engine.scheduler import Limits
from prefixcache.core.stats import PoolStats
from prefixcache.errors import (
    DrainingError,
    ExceedsPoolError,
    PrefixCacheError,
    QuotaExceededError,
    TooManySequencesError,
    UnavailableError,
)
from prefixcache.types import LookupResult
from tests.core.manager import A, C, Manager, T, U
from tests.examples.engine.local_engine import LocalEngine, LocalSequence, answer_to, spell


def counted(engine: LocalEngine) -> PoolStats:
    return engine.cache.manager.sequences.stats()


def lengths(engine: LocalEngine) -> list[list[int]]:
    return engine.runner.steps


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 16, 30])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_one_request_is_answered_in_chunks(length: int, max_tokens: int) -> None:
    engine = LocalEngine(Manager(20))
    asked = engine.ask(T(length), max_tokens)
    engine.run()
    assert asked.is_answered()
    whole, rest = divmod(length, 8)
    chunks = [[8]] * whole + ([[rest]] if rest else [])
    assert lengths(engine) == chunks + [[1]] * (max_tokens - 1)
    counters = engine.engine.counters
    assert (counters.computed_tokens, counters.computed_prompt_tokens) == (
        length + max_tokens - 1,
        length,
    )
    assert counted(engine).referenced == 0


def test_decoding_goes_on_beside_the_chunks_of_a_long_prompt() -> None:
    engine = LocalEngine(Manager(40))
    first = engine.ask(T(3), max_tokens=5)
    engine.turn()
    second = engine.ask(A(20), max_tokens=2)
    engine.run()
    assert first.is_answered() and second.is_answered()
    assert lengths(engine) == [[3], [1, 7], [1, 7], [1, 6], [1, 1]]


def test_the_budget_goes_to_those_who_came_first() -> None:
    engine = LocalEngine(Manager(60), Limits(max_tokens_per_step=2, max_running=8))
    asked = [engine.ask(prompt(1), max_tokens=3) for prompt in (T, U, A, C)]
    engine.run()
    assert all(one.is_answered() for one in asked)
    assert lengths(engine) == [[1, 1]] * 6


def test_the_running_are_limited() -> None:
    engine = LocalEngine(Manager(60), Limits(max_tokens_per_step=100, max_running=2))
    asked = [engine.ask(prompt(5), max_tokens=2) for prompt in (T, U, A)]
    engine.turn()
    assert [len(engine.running), len(engine.waiting)] == [2, 1]
    engine.run()
    assert all(one.is_answered() for one in asked)
    assert lengths(engine) == [[5, 5], [1, 1], [5], [1]]


def test_a_request_waits_for_room_and_nobody_overtakes_it() -> None:
    engine = LocalEngine(Manager(6))
    first = engine.ask(T(12), max_tokens=2)
    engine.turn(2)
    large = engine.ask(A(16), max_tokens=1)
    small = engine.ask(C(1), max_tokens=1)
    engine.turn()
    assert not large.deltas and not small.deltas
    engine.run()
    assert first.is_answered() and large.is_answered() and small.is_answered()
    assert engine.scheduler.num_preempted == 0


def test_a_prompt_is_admitted_only_if_the_running_can_grow_by_a_block() -> None:
    engine = LocalEngine(Manager(4))
    first = engine.ask(T(7), max_tokens=6)
    engine.turn()
    second = engine.ask(A(5), max_tokens=1)
    engine.run()
    assert first.is_answered() and second.is_answered()
    assert engine.scheduler.num_preempted == 0
    assert lengths(engine) == [[7], *[[1]] * 5, [5]]


def test_the_youngest_is_preempted_and_goes_on_with_its_tokens() -> None:
    engine = LocalEngine(Manager(5), Limits(max_tokens_per_step=8, max_running=2))
    old = engine.ask(T(4), max_tokens=10)
    young = engine.ask(A(4), max_tokens=10)
    last = engine.ask(C(4), max_tokens=10)
    engine.turn()
    while not old.ends():
        assert old.request.sequence is not None
        assert not last.deltas  # the preempted one came before it
        engine.turn()
    assert engine.scheduler.num_preempted > 0
    engine.run()
    for asked in (old, young, last):
        assert asked.is_answered()
        assert len(asked.deltas) == 10  # a token each, none twice
    assert counted(engine).requests == 3  # one that comes again is no new query


def test_what_was_preempted_is_computed_from_what_is_still_cached() -> None:
    manager = Manager(8)
    engine = LocalEngine(manager, Limits(max_tokens_per_step=100))
    engine.ask(T(8), max_tokens=3)
    young = engine.ask(A(8), max_tokens=3)
    engine.turn(2)
    before = engine.runner.num_computed
    engine.scheduler._preempt(engine.running[-1])
    engine.run()
    assert young.is_answered()
    # Its full blocks are cached: of its 10 tokens two are left, and then one more.
    assert lengths(engine)[2:] == [[1, 2]]
    assert engine.runner.num_computed == before + 3
    assert {delta.num_cached_tokens for delta in young.deltas} == {0}


def test_one_that_can_never_fit_is_refused_and_the_others_go_on() -> None:
    engine = LocalEngine(Manager(4))
    large = engine.ask(T(17))
    small = engine.ask(A(3))
    engine.run()
    (delta,) = large.deltas
    assert isinstance(delta.error, ExceedsPoolError)
    assert small.is_answered()


def test_one_that_outgrows_the_pool_is_refused_in_the_end() -> None:
    engine = LocalEngine(Manager(4))
    asked = engine.ask(T(12), max_tokens=10)
    engine.run()
    assert isinstance(asked.deltas[-1].error, ExceedsPoolError)
    assert asked.text() == spell(answer_to(T(12), 5))  # up to the pool's 16 tokens, and one more
    assert counted(engine).referenced == 0


def test_a_shared_prefix_is_waited_for_and_those_behind_go_first() -> None:
    engine = LocalEngine(Manager(40), Limits(max_tokens_per_step=12, max_running=4))
    shared = T(16)
    first = engine.ask([*shared, 31], max_tokens=1)
    second = engine.ask([*shared, 32], max_tokens=1)
    third = engine.ask(A(2), max_tokens=1)
    engine.run()
    assert first.is_answered() and second.is_answered() and third.is_answered()
    # Beside the end of the first the third is computed; then one token of the second is left.
    assert lengths(engine) == [[12], [5, 2], [1]]
    assert second.deltas[0].num_cached_tokens == 16
    assert counted(engine).requests == 3  # looking again is no query


def test_two_engines_compute_a_shared_prefix_once() -> None:
    manager = Manager(40)
    one, two = LocalEngine(manager, owner=b"one"), LocalEngine(manager, owner=b"two")
    shared = T(16)
    first = one.ask([*shared, 31], max_tokens=2)
    second = two.ask([*shared, 32], max_tokens=2)
    beside = two.ask(A(2), max_tokens=3)
    one.turn()
    two.turn()
    assert len(two.running) == len(two.waiting) == 1
    for _ in range(6):
        one.turn()
        two.turn()
    assert first.is_answered() and second.is_answered() and beside.is_answered()
    assert (one.runner.num_computed, two.runner.num_computed) == (18, 2 + 4)


def test_the_other_engine_takes_over_when_the_first_is_lost() -> None:
    manager = Manager(40)
    one, two = LocalEngine(manager, owner=b"one"), LocalEngine(manager, owner=b"two")
    one.ask(T(20), max_tokens=2)
    asked = two.ask(T(20), max_tokens=2)
    one.turn()
    two.turn()
    assert not asked.deltas and two.waiting
    one.cache.lose_session(one.engine)
    two.run()
    assert asked.is_answered()
    assert two.runner.num_computed == 20 - 8 + 1  # the first had computed two blocks


def test_the_wait_for_others_has_an_end() -> None:
    manager = Manager(40)
    limits = Limits(max_tokens_per_step=8, max_wait_pending_s=3.0)
    one, two = LocalEngine(manager, owner=b"one"), LocalEngine(manager, limits, owner=b"two")
    one.ask(T(20), max_tokens=2)
    one.turn()  # and never again
    asked = two.ask(T(20), max_tokens=2)
    for two.clock_s in (0.0, 1.0, 2.9):
        two.turn()
        assert two.waiting
    two.clock_s = 3.0
    two.run()
    assert asked.is_answered()


def test_who_is_preempted_may_wait_for_others_again() -> None:
    manager = Manager(40)
    limits = Limits(max_tokens_per_step=8, max_wait_pending_s=3.0)
    one, two = LocalEngine(manager, limits, b"one"), LocalEngine(manager, limits, b"two")
    first = one.ask(T(12), max_tokens=1)
    one.turn()
    asked = two.ask(T(12), max_tokens=9)
    two.turn()
    assert two.waiting
    one.run()
    two.turn(6)
    two.clock_s = 4.0
    manager.sequences.reset(force=True)  # else it would find all of it
    two.scheduler._preempt(two.running[0])
    again = one.ask([*asked.request.tokens, 1], max_tokens=1)
    one.turn()
    two.turn()
    assert two.waiting and not two.running
    one.run()
    two.run()
    assert first.is_answered() and asked.is_answered() and again.is_answered()


@contextmanager
def overtaken(engine: LocalEngine, by: LocalEngine, prompt: list[int]) -> Iterator[None]:
    """The other one begins with a prompt between this one's Lookup and its Allocate."""
    lookup = engine.cache.lookup

    def slow(tokens: list[int], **options: Any) -> LookupResult:
        result = lookup(tokens, **options)
        if not by.running:
            by.ask(prompt, max_tokens=2)
            by.turn()
        return result

    engine.cache.lookup = slow  # type: ignore[method-assign]
    yield
    engine.cache.lookup = lookup  # type: ignore[method-assign]


def test_an_engine_that_was_slower_lets_its_sequence_go() -> None:
    manager = Manager(40)
    one, two = LocalEngine(manager, owner=b"one"), LocalEngine(manager, owner=b"two")
    asked = two.ask(T(20), max_tokens=2)
    with overtaken(two, by=one, prompt=T(20)):
        two.turn()
    assert two.waiting and not two.running
    one.run()
    two.run()
    assert asked.is_answered()
    assert (
        two.runner.num_computed == 1 + 1
    )  # all of the prompt is cached, and its last token asked for


def test_room_that_another_engine_took_is_waited_for() -> None:
    manager = Manager(6)
    one, two = LocalEngine(manager, owner=b"one"), LocalEngine(manager, owner=b"two")
    asked = two.ask(T(9), max_tokens=2)
    with overtaken(two, by=one, prompt=A(16)):
        two.turn()
    assert two.waiting and not two.running
    one.run()
    two.run()
    assert asked.is_answered()


@pytest.mark.parametrize(
    "error",
    [
        QuotaExceededError(needed=3, held=2, allowed=4),
        TooManySequencesError(5),
        DrainingError(),
    ],
)
def test_a_refusal_that_may_pass_is_waited_out(error: PrefixCacheError) -> None:
    engine = LocalEngine(Manager(20))
    asked = engine.ask(T(9), max_tokens=2)
    sequence = engine.cache.sequence
    engine.cache.sequence = refusing(error)  # type: ignore[method-assign]
    engine.turn(3)
    assert engine.waiting and not asked.deltas
    engine.cache.sequence = sequence  # type: ignore[method-assign]
    engine.run()
    assert asked.is_answered()
    assert engine.engine.counters.restarts == 0


def test_a_quota_that_is_too_small_for_the_prompt_is_an_error() -> None:
    engine = LocalEngine(Manager(20))
    asked = engine.ask(T(9))
    engine.cache.sequence = refusing(QuotaExceededError(3, 0, 2))  # type: ignore[method-assign]
    engine.run()
    assert isinstance(asked.deltas[0].error, QuotaExceededError)


def test_a_refusal_is_told_also_if_the_daemon_is_lost_right_after_it() -> None:
    engine = LocalEngine(Manager(4))
    large, small = engine.ask(T(17)), engine.ask(A(3))
    sequence = engine.cache.sequence

    def lost(tokens: list[int], **options: Any) -> Any:
        if len(tokens) == 3:
            raise UnavailableError("gone")
        return sequence(tokens, **options)

    engine.cache.sequence = lost  # type: ignore[method-assign]
    engine.turn()
    assert isinstance(large.deltas[0].error, ExceedsPoolError)
    engine.cache.sequence = sequence  # type: ignore[method-assign]
    engine.run()
    assert small.is_answered()
    assert engine.engine.counters.restarts == 1


def test_choices_that_may_not_be_forked_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalSequence, "fork", refusing(TooManySequencesError(5)))
    engine = LocalEngine(Manager(20))
    asked = engine.ask(T(9), max_tokens=3, num_choices=3)
    engine.run()
    assert asked.is_answered()
    assert engine.engine.counters.restarts == 0


def test_what_could_not_be_freed_is_freed_later() -> None:
    engine = LocalEngine(Manager(20))
    asked = engine.ask(T(9), max_tokens=2)
    engine.turn(3)
    assert asked.is_answered()
    free = engine.cache.free
    engine.cache.free = refusing(UnavailableError("gone"))  # type: ignore[method-assign]
    engine.turn(2)
    engine.cache.free = free  # type: ignore[method-assign]
    assert counted(engine).referenced > 0 and not engine.scheduler.is_idle
    engine.run()
    assert counted(engine).referenced == 0


def refusing(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    return refuse


def test_an_end_token_ends_the_answer_and_is_no_part_of_it() -> None:
    tokens = answer_to(T(5), 20)
    engine = LocalEngine(Manager(20), end_tokens=[tokens[6]])
    asked = engine.ask(T(5), max_tokens=20)
    engine.run()
    assert asked.text() == spell(tokens[: tokens.index(tokens[6])])
    assert asked.ends() == ["stop"]


def test_what_a_stop_text_might_have_begun_with_is_part_of_an_answer_that_ends() -> None:
    tokens = answer_to(T(5), 6)
    engine = LocalEngine(Manager(20))
    stop = spell(tokens[-2:]) + "never"
    asked = engine.ask(T(5), max_tokens=6, stop=(stop,))
    engine.run()
    assert asked.is_answered()


def test_one_whose_caller_is_gone_is_freed() -> None:
    manager = Manager(20)
    engine = LocalEngine(manager)
    running, waiting = engine.ask(T(30)), engine.ask(T(20))
    engine.turn(2)
    assert counted(engine).referenced > 0 and engine.waiting
    running.drop()
    waiting.drop()
    engine.turn()
    assert counted(engine).referenced == 0
    assert engine.scheduler.is_idle and not running.deltas and not waiting.deltas


def test_choices_share_the_prompt() -> None:
    manager = Manager(20)
    engine = LocalEngine(manager, Limits(max_tokens_per_step=20, max_running=4))
    asked = engine.ask(T(10), max_tokens=4, num_choices=3)
    engine.turn()
    # Two full blocks and a part of one, not three times three.
    assert counted(engine).referenced == 3
    engine.run()
    assert asked.is_answered()
    assert lengths(engine) == [[10], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_choices_that_find_no_room_wait_and_are_answered_all_the_same() -> None:
    engine = LocalEngine(Manager(5))
    asked = engine.ask(T(10), max_tokens=9, num_choices=4)
    engine.run()
    assert asked.is_answered()
    assert engine.scheduler.num_preempted > 0


def test_choices_are_counted_before_a_question_is_admitted() -> None:
    engine = LocalEngine(Manager(40), Limits(max_tokens_per_step=20, max_running=4))
    first = engine.ask(T(2), max_tokens=3, num_choices=2)
    second = engine.ask(A(2), max_tokens=3, num_choices=3)
    engine.turn(2)
    assert len(engine.running) == 2
    engine.run()
    assert first.is_answered() and second.is_answered()


def test_more_choices_than_may_run_are_admitted_when_nothing_runs() -> None:
    engine = LocalEngine(Manager(40), Limits(max_tokens_per_step=20, max_running=2))
    asked = engine.ask(T(2), max_tokens=3, num_choices=5)
    engine.run()
    assert asked.is_answered()


def test_more_than_may_wait_are_not_taken() -> None:
    limits = Limits(max_tokens_per_step=8, max_running=1, max_waiting=2)
    engine = LocalEngine(Manager(40), limits)
    asked = [engine.ask(T(3), max_tokens=5), engine.ask(U(3), max_tokens=5)]
    with pytest.raises(EngineFullError, match="2 requests wait, and 2 may"):
        engine.ask(A(3))
    engine.turn()  # one of them runs
    asked.append(engine.ask(A(3), max_tokens=5))
    with pytest.raises(EngineFullError):
        engine.ask(C(3))
    engine.run()
    assert all(one.is_answered() for one in asked)


def test_a_prompt_is_found_by_those_of_its_salt_only() -> None:
    engine = LocalEngine(Manager(40))
    for salt, num_cached in (("", 0), ("a", 0), ("b", 0), ("a", 8), ("", 8)):
        asked = engine.ask(T(11), max_tokens=2, cache_salt=salt)
        engine.run()
        assert asked.is_answered()
        assert asked.deltas[-1].num_cached_tokens == num_cached


def test_a_lost_session_changes_no_answer() -> None:
    manager = Manager(20)
    engine = LocalEngine(manager)
    asked = [engine.ask(T(9), max_tokens=6), engine.ask(A(5), max_tokens=6, num_choices=2)]
    for _ in range(4):
        engine.turn(2)
        engine.cache.lose_session(engine.engine)
    engine.run()
    assert all(one.is_answered() for one in asked)
    assert engine.engine.counters.restarts > 0
    assert counted(engine).referenced == 0
