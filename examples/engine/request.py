"""One answer to one prompt: what was asked, the tokens so far, and who is told of them.

A prompt with several choices is one request until it is computed; then it is forked into one for
each. All of it belongs to the engine's thread, but for `Caller.is_gone`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefixcache.client import Sequence
from prefixcache.integrations.transformers import GREEDY, Sampling
from prefixcache.types import ExtraKeys


@dataclass(frozen=True, slots=True)
class Question:
    """stop: texts that end the answer and are no part of it. cache_salt: the prompt is found by
    those of the same one only.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int = 1
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    cache_salt: str = ""

    @property
    def extra_keys(self) -> ExtraKeys:
        return ExtraKeys(cache_salt=self.cache_salt)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step has added to a choice.

    finish_reason: "stop" or "length" with the last one. num_cached_tokens: of the prompt, when it
    was first admitted. error: instead of an answer, and the last one too.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Caller:
    """Who asked. `tell` is called in the engine's thread.

    is_gone: set by the caller, in any thread. It wants no more, and what it holds is freed.
    """

    tell: Callable[[Delta], None]
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """A choice, or all choices of a question that are still one.

    arrival: its place in the order of all requests, which the scheduler gives it.
    tokens: the prompt and the output. sequence: its blocks, while it runs.
    num_cached_tokens: None until it was first admitted. wait_until_s: by the scheduler's clock, how
    long it waits for others that compute its prefix. answer: the engine's, see `loop`.
    """

    question: Question
    caller: Caller
    index: int = 0
    num_choices: int = 1
    arrival: tuple[int, int] = (0, 0)
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    num_cached_tokens: int | None = None
    wait_until_s: float | None = None
    answer: Any = None

    @classmethod
    def of(cls, question: Question, caller: Caller, first_index: int = 0) -> Request:
        """first_index: of its choices."""
        tokens = list(question.prompt)
        return cls(question, caller, first_index, question.num_choices, tokens=tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.question.prompt)

    @property
    def new_tokens(self) -> list[int]:
        """Those without K/V, of a request that runs."""
        assert self.sequence is not None
        return self.tokens[self.sequence.num_computed_tokens :]

    @property
    def unsent_tokens(self) -> list[int]:
        """Those that its sequence does not have yet: the token chosen last, or none."""
        assert self.sequence is not None
        return self.tokens[self.sequence.num_tokens :]

    def sibling(self, offset: int, sequence: Sequence | None) -> Request:
        """Another choice of the same question, that has the same tokens."""
        request, choice = self.arrival
        return Request(
            self.question,
            self.caller,
            self.index + offset,
            arrival=(request, choice + offset),
            tokens=list(self.tokens),
            sequence=sequence,
            num_cached_tokens=self.num_cached_tokens,
        )
