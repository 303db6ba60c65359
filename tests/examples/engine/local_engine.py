"""Engines without a model and without a daemon: the block manager's core is called directly.

The invariants of the core are checked after every call. A token follows from all tokens before it,
so whatever way an answer was computed, it is `answer_to` its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch

from examples.engine.loop import Engine
from examples.engine.request import Caller, Delta, Question, Request
from examples.engine.scheduler import Chunk, Limits, Scheduler
from prefixcache.errors import SessionLostError, WrongPositionError
from prefixcache.types import AppendResult, ExtraKeys, LookupResult, ResultCode
from tests.core.manager import Held, Manager

VOCABULARY = 40


class LocalSequence:
    """What the engine uses of `prefixcache.client.Sequence`."""

    def __init__(self, manager: Manager, held: Held, num_pending_tokens: int = 0) -> None:
        self.manager = manager
        self.held = held
        self.is_lost = False
        self.num_cached_tokens = self.num_computed_tokens = held.cached
        self.num_pending_tokens = num_pending_tokens

    @property
    def num_tokens(self) -> int:
        return self.held.num_tokens

    def compute(self, num_tokens: int) -> None:
        self.num_computed_tokens += num_tokens
        result = self.manager.commit(self.held, self.num_computed_tokens)
        assert result.code is ResultCode.OK

    def fork(self, num_children: int) -> list[LocalSequence]:
        return [
            LocalSequence(self.manager, held) for held in self.manager.fork(self.held, num_children)
        ]


class LocalCache:
    """What the engine uses of `prefixcache.Client`, with an owner of its own."""

    def __init__(self, manager: Manager, owner: bytes) -> None:
        self.manager = manager
        self.owner = owner
        self.live: list[LocalSequence] = []

    def lookup(self, tokens: list[int], *, extra_keys: ExtraKeys) -> LookupResult:
        return self.manager.lookup(tokens, extra_keys)

    def sequence(self, tokens: list[int], *, extra_keys: ExtraKeys, resumed: bool = False) -> Any:
        num_pending = self.lookup(tokens, extra_keys=extra_keys).num_pending_tokens
        held = self.manager.allocate(tokens, extra_keys, owner=self.owner, resumed=resumed)
        sequence = LocalSequence(self.manager, held, num_pending)
        self.live.append(sequence)
        return sequence

    def append(self, sequences: Items[Any], tokens: list[Any]) -> list[AppendResult]:
        if any(sequence.is_lost for sequence in sequences):
            raise SessionLostError("the test says so")
        return [
            self.manager.append(sequence.held, new_tokens)
            for sequence, new_tokens in zip(sequences, tokens, strict=True)
        ]

    def free(self, sequences: Items[Any]) -> list[ResultCode]:
        return [
            ResultCode.NOT_FOUND if sequence.is_lost else self.manager.free(sequence.held)[0]
            for sequence in sequences
        ]

    def lose_session(self, engine: Engine) -> None:
        """As after a restart, but what was cached stays."""
        for request in engine.scheduler.running:
            sequence: Any = request.sequence
            self.manager.free(sequence.held)
            sequence.is_lost = True


class LocalRunner:
    """Computes nothing, but counts and checks what it is asked for."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        """Tokens of each chunk of each step."""

    def forward(self, chunks: Items[Chunk]) -> torch.Tensor:
        if any(chunk.sequence.is_lost for chunk in chunks):  # type: ignore[attr-defined]
            raise SessionLostError("the test says so")
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        logits = torch.zeros(len(chunks), VOCABULARY)
        for row, chunk in enumerate(chunks):
            sequence: Any = chunk.sequence
            start = sequence.num_computed_tokens
            tokens = chunk.request.tokens[: start + len(chunk.token_ids)]
            if tokens[start:] != chunk.token_ids or len(tokens) > sequence.num_tokens:
                raise WrongPositionError(sequence.held.sequence_id, start, sequence.num_tokens)
            sequence.compute(len(chunk.token_ids))
            logits[row, next_token(tokens)] = 1.0
        return logits

    @property
    def num_computed(self) -> int:
        return sum(map(sum, self.steps))


def next_token(tokens: Items[int]) -> int:
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def answer_to(prompt: Items[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def spell(tokens: Items[int]) -> str:
    """Each token is a character."""
    return "".join(chr(0x4E00 + token) for token in tokens)


class LocalEngine:
    """An engine whose turns the test makes, one by one; `clock_s` is its time."""

    def __init__(
        self,
        manager: Manager,
        limits: Limits = Limits(max_tokens_per_step=8, max_running=4),  # noqa: B008 - frozen
        owner: bytes = b"engine",
        end_tokens: Items[int] = (),
    ) -> None:
        self.clock_s = 0.0
        self.cache = LocalCache(manager, owner)
        self.runner = LocalRunner()
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: self.clock_s)
        self.engine = Engine(self.scheduler, self.runner, spell, end_tokens)

    def ask(self, prompt: Items[int], max_tokens: int = 4, **options: Any) -> Asked:
        asked = Asked(Question(tuple(prompt), max_tokens, **options))
        self.engine.submit([asked.request])
        return asked

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.serve_once()

    def run(self, most: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            self.turn()
            if self.scheduler.is_idle:
                return
        raise AssertionError(f"not idle after {most} turns")

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Request]:
        return self.scheduler.waiting


class Asked:
    """A question, and what its caller was told."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.deltas: list[Delta] = []
        self.caller = Caller(self.deltas.append)
        self.request = Request.of(question, self.caller)

    def drop(self) -> None:
        self.caller.is_gone = True

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def ends(self) -> list[str | None]:
        """Finish reasons by choice; each choice that ends does so once."""
        last = {delta.index: delta for delta in self.deltas if delta.is_last}
        assert len(last) == sum(delta.is_last for delta in self.deltas)
        return [last[index].finish_reason for index in sorted(last)]

    def is_answered(self) -> bool:
        """All choices are there, and are what the model says."""
        count = self.question.num_choices
        wanted = spell(answer_to(self.question.prompt, self.question.max_tokens))
        return self.ends() == ["length"] * count and all(
            self.text(index) == wanted for index in range(count)
        )
