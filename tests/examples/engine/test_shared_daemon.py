"""Several engines on one daemon: each answer is the model's own, each prefix is computed once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from examples.engine.loop import Engine
from examples.engine.request import Caller, Delta, Question, Request
from examples.engine.runner import TransformersRunner, TransformersTokenizer, load
from examples.engine.scheduler import Limits, Scheduler
from prefixcache.client import Client
from prefixcache.integrations.transformers import serve_flags
from tests.examples.engine.endpoint import BLOCK_SIZE, daemon_for
from tests.examples.engine.held_engine import held_after
from tests.examples.engine.tiny_model import plain_tokens
from tests.support.program import serving

MAX_TOKENS = 20


@pytest.fixture(params=[True, False], ids=["attached", "rpc"])
def attached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextmanager
def running_engine(folder: Path, target: str, attached: bool, limits: Limits) -> Iterator[Engine]:
    model, tokenizer = load(str(folder))
    with (
        Client(target) as client,
        closing(TransformersRunner(model, client, attached=attached)) as runner,
    ):
        text = TransformersTokenizer(tokenizer)
        # Without a token that ends: all answers are equally long.
        engine = Engine(Scheduler(client, limits), runner, text.decode, end_tokens=())
        engine.start()
        try:
            yield engine
        finally:
            engine.close()


class Asked:
    """A question that an engine's thread answers."""

    def __init__(self, engine: Engine, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> None:
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.num_told = 0
        self.has_some = threading.Event()
        self.is_done = threading.Event()
        self.error: Exception | None = None
        caller = Caller(self._tell)
        self.request = Request.of(Question(tuple(prompt), max_tokens), caller)
        engine.submit([self.request])

    def _tell(self, delta: Delta) -> None:
        self.num_told += delta.num_tokens
        self.error = delta.error
        self.has_some.set()
        if delta.is_last:
            self.is_done.set()

    def check(self) -> None:
        assert self.is_done.wait(60)
        assert self.error is None
        assert self.request.tokens == self.prompt + plain_tokens(self.prompt, self.max_tokens)
        assert self.num_told == self.max_tokens


def prompts(num_prefixes: int, num_each: int) -> list[list[int]]:
    """In turns, so that all engines get one of each prefix at about the same time."""
    return [
        [*range(10 * prefix, 10 * prefix + 41), 200 + own, 100 + prefix, own]
        for prefix in range(num_prefixes)
        for own in range(num_each)
    ]


def num_unique(tokens: Sequence[Sequence[int]]) -> int:
    """Tokens that a cache of full blocks has computed at least, all prompts together."""
    known: set[tuple[int, ...]] = set()
    count = 0
    for prompt in tokens:
        for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
            if tuple(prompt[:end]) not in known:
                known.add(tuple(prompt[:end]))
                count += BLOCK_SIZE
        count += len(prompt) % BLOCK_SIZE
    return count


def test_each_prefix_is_computed_once(folder: Path, attached: bool) -> None:
    asked = prompts(num_prefixes=3, num_each=8)
    with daemon_for(folder, num_blocks=600) as running, ExitStack() as stack:
        limits = Limits(max_tokens_per_step=12, max_running=4)
        engines = [
            stack.enter_context(running_engine(folder, running.target, attached, limits))
            for _ in range(4)
        ]
        questions = [
            Asked(engines[number % 4], prompt, max_tokens=3) for number, prompt in enumerate(asked)
        ]
        for question in questions:
            question.check()
        assert sum(engine.scheduler.num_preempted for engine in engines) == 0
        computed = sum(engine.counters.computed_prompt_tokens for engine in engines)
    assert computed == num_unique(asked) < len(asked) * len(asked[0]) / 3


def test_answers_are_right_on_a_pool_that_is_too_small(folder: Path, attached: bool) -> None:
    """Chunks of a few tokens, and preemption in all engines."""
    asked = prompts(num_prefixes=2, num_each=6)
    with daemon_for(folder, num_blocks=40) as running, ExitStack() as stack:
        limits = Limits(max_tokens_per_step=7, max_running=4)
        engines = [
            stack.enter_context(running_engine(folder, running.target, attached, limits))
            for _ in range(2)
        ]
        questions = [Asked(engines[n % 2], prompt) for n, prompt in enumerate(asked)]
        for question in questions:
            question.check()
        assert sum(engine.scheduler.num_preempted for engine in engines) > 0
        with Client(running.target) as client:
            assert client.stats().num_blocks == 40


def test_a_restart_of_the_daemon_changes_no_answer(
    folder: Path, tmp_path: Path, attached: bool
) -> None:
    options = [*serve_flags(load(str(folder))[0])]
    options += ["--num-blocks", "100", "--block-size", str(BLOCK_SIZE)]
    limits = Limits(max_tokens_per_step=8, max_running=4)
    with ExitStack() as stack:
        with serving(tmp_path, *options) as daemon:
            target = daemon.addresses[0]
            engine = stack.enter_context(running_engine(folder, target, attached, limits))
            is_killed = threading.Event()
            stack.enter_context(held_after(engine, 60, is_killed.is_set))
            first = [Asked(engine, prompt, max_tokens=150) for prompt in prompts(1, 2)]
            assert all(asked.has_some.wait(60) for asked in first)
        is_killed.set()
        assert not any(asked.is_done.is_set() for asked in first)
        second = Asked(engine, prompts(2, 1)[1])
        with serving(tmp_path, *options):
            for asked in [*first, second]:
                asked.check()
            assert engine.counters.restarts > 0
            engine.close()
