"""Whatever comes in whatever order: every answer is right, budgets are kept, nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from examples.engine.scheduler import Limits
from tests.core.manager import Manager
from tests.examples.engine.local_engine import Asked, LocalEngine

LONGEST = 14 + 8
"""Tokens of a prompt and its answer, in `prompts` and `events`."""

prompts = st.tuples(st.integers(0, 2), st.integers(1, 14)).map(
    lambda drawn: [drawn[0]] * min(drawn[1], 9) + list(range(max(0, drawn[1] - 9)))
)
"""Few beginnings, so that many share one."""
events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), prompts, st.integers(1, 8), st.integers(1, 3)),
        st.tuples(st.just("turn")),
        st.tuples(st.just("turn")),
        st.tuples(st.just("drop"), st.integers(0, 100)),
        st.tuples(st.just("lose")),
    ),
    max_size=40,
)
limits = st.builds(
    Limits,
    max_tokens_per_step=st.integers(1, 12),
    max_running=st.integers(1, 5),
    max_wait_pending_s=st.just(1000.0),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(-(-LONGEST // 4), 20),
    limits=st.tuples(limits, limits),
    events=st.lists(st.tuples(st.integers(0, 1), events), min_size=1, max_size=3),
)
def test_every_answer_is_right(num_blocks, limits, events) -> None:  # type: ignore[no-untyped-def]
    manager = Manager(num_blocks)
    engines = [
        LocalEngine(manager, limit, owner=bytes([number])) for number, limit in enumerate(limits)
    ]
    asked: list[Asked] = []
    dropped: set[Asked] = set()
    for place, some in events:
        for kind, *arguments in some:
            engine = engines[place]
            if kind == "ask":
                prompt, max_tokens, num_choices = arguments
                asked.append(engine.ask(prompt, max_tokens, num_choices=num_choices))
            elif kind == "turn":
                engine.turn()
            elif kind == "lose":
                engine.cache.lose_session(engine.engine)
            elif asked:
                gone = asked[arguments[0] % len(asked)]
                gone.drop()
                dropped.add(gone)
    finish(engines)
    for one in asked:
        assert one in dropped or one.is_answered()
    for engine, limit in zip(engines, limits, strict=True):
        assert all(sum(step) <= limit.max_tokens_per_step for step in engine.runner.steps)
    assert manager.sequences.stats().referenced == 0


def finish(engines: list[LocalEngine]) -> None:
    """Both make their turns until neither has anything left: nobody starves."""
    for _ in range(5000):
        for engine in engines:
            engine.turn()
        if all(engine.scheduler.is_idle for engine in engines):
            return
    raise AssertionError("not idle after 5000 turns")
