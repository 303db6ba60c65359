"""Which tokens of which requests are computed in the next step.

Owns the order of the requests and their sequences; computes nothing and does no I/O but the calls
on sequences. One thread.

- A step computes at most `max_tokens_per_step` tokens. Who came first is served first: those that
  decode take one token each, prompts come in chunks of what is left of the budget.
- A request is admitted when the pool has room for all of its tokens and for one block more of
  each that runs. For room nobody overtakes: the first that waits gets it.
- A prompt whose next blocks another sequence is computing, in this engine or in another one on the
  same daemon, is looked at again in the next step: those after it may go first. So a prefix is
  computed once, and the wait stops nobody. It is bounded: the other might be slow.
- When a sequence cannot grow, the request that came last is preempted: its sequence is freed and it
  waits again, with the tokens it has. Most of them are still cached then.

Between engines there is no order: what each can count on are the quotas of the daemon.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from examples.engine.request import Request
from prefixcache.client import Sequence
from prefixcache.errors import (
    DrainingError,
    InvalidArgumentError,
    PrefixCacheError,
    QuotaExceededError,
    ResourceExhaustedError,
)
from prefixcache.types import AppendResult, ExtraKeys, LookupResult, ResultCode

_NO_ROOM = {ResultCode.NO_ROOM, ResultCode.QUOTA_EXCEEDED, ResultCode.EXCEEDS_POOL}
_BY_ARRIVAL = attrgetter("arrival")


class SequenceGoneError(Exception):
    """The daemon has not, or not as it should be, a sequence that the engine believes to have."""


class Cache(Protocol):
    """What the scheduler needs of `prefixcache.Client`."""

    def lookup(self, tokens: list[int], *, extra_keys: ExtraKeys) -> LookupResult: ...
    def sequence(
        self, tokens: list[int], *, extra_keys: ExtraKeys, resumed: bool = ...
    ) -> Sequence: ...
    def append(self, sequences: list[Sequence], tokens: list[Any]) -> list[AppendResult]: ...
    def free(self, sequences: list[Sequence]) -> list[ResultCode]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """max_wait_pending_s: longest wait for others that compute a request's prefix. max_waiting:
    requests, those that are preempted included; more are not taken in.
    """

    max_tokens_per_step: int = 256
    max_running: int = 16
    max_wait_pending_s: float = 60.0
    max_waiting: int = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a request. is_last: none are left, so the logits say what comes next."""

    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    is_last: bool

    @property
    def sequence(self) -> Sequence:
        assert self.request.sequence is not None
        return self.request.sequence


class _Admission(enum.Enum):
    ADMITTED = enum.auto()
    NO_ROOM = enum.auto()
    PENDING = enum.auto()


class Scheduler:
    """running and waiting: by arrival. num_preempted: counts preemptions."""

    def __init__(
        self, cache: Cache, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preempted = 0
        self.limits = limits
        self._cache = cache
        self._clock = clock
        self._arrivals = itertools.count()
        self._refused: list[tuple[Request, PrefixCacheError]] = []
        self._ended: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting or self._ended)

    def add(self, request: Request) -> None:
        request.arrival = (next(self._arrivals), 0)
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """It is answered, or nobody wants the answer. Its blocks are freed by the next step."""
        (self.waiting if request.sequence is None else self.running).remove(request)
        self._drop_sequence(request)

    def schedule(self) -> list[Chunk]:
        """Free what has ended, let those that run grow, admit others; choose what to compute.

        Raises the errors of the client but those for want of room, and SequenceGoneError: then
        `restart` makes good.
        """
        self._free_ended()
        self._grow()
        chunks: list[Chunk] = []
        budget = self.limits.max_tokens_per_step
        for request in self.running:
            budget -= _take(chunks, request, budget)
        self._admit(chunks, budget)
        return chunks

    def take_refused(self) -> list[tuple[Request, PrefixCacheError]]:
        """Requests that can never be served, and why; they are out of the scheduler."""
        refused, self._refused = self._refused, []
        return refused

    def fork(self, request: Request) -> list[Request]:
        """One request for each of its choices, once its prompt is computed; it is the first."""
        num_children = request.num_choices - 1
        if not num_children:
            return [request]
        assert request.sequence is not None
        sequences: list[Sequence] = []
        # Refused, the children wait, and will find the prompt cached.
        with contextlib.suppress(ResourceExhaustedError, DrainingError):
            sequences = request.sequence.fork(num_children)
        request.num_choices = 1
        children = []
        for offset, sequence in itertools.zip_longest(range(1, num_children + 1), sequences):
            child = request.sibling(offset, sequence)
            self._insert(self.waiting if sequence is None else self.running, child)
            children.append(child)
        return [request, *children]

    def restart(self) -> None:
        """Let all wait again with the tokens they have: their sequences may be gone."""
        while self.running:
            self._wait_again(self.running[-1])

    # ---- inside

    def _grow(self) -> None:
        """Give each sequence that runs the token that was chosen last."""
        growing = [request for request in self.running if request.unsent_tokens]
        while growing:
            results = self._cache.append(
                [request.sequence for request in growing if request.sequence is not None],
                [request.unsent_tokens for request in growing],
            )
            refused = []
            for request, result in zip(growing, results, strict=True):
                if result.code in _NO_ROOM:
                    refused.append(request)
                elif result.code is not ResultCode.OK:
                    raise SequenceGoneError(result.code.name)
            if refused:
                self._preempt(self.running[-1])
            growing = [request for request in refused if request.sequence is not None]

    def _preempt(self, request: Request) -> None:
        self.num_preempted += 1
        self._wait_again(request)
        self._free_ended()

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        for request in self.waiting[: self.limits.max_running]:
            num_running = sum(other.num_choices for other in self.running)
            is_full = num_running + request.num_choices > self.limits.max_running
            if not budget or (num_running and is_full):
                return
            try:
                admission = self._allocate(request)
            except (InvalidArgumentError, QuotaExceededError) as error:
                self.waiting.remove(request)
                self._refused.append((request, error))
                continue
            if admission is _Admission.NO_ROOM:
                return
            if admission is _Admission.ADMITTED:
                self.waiting.remove(request)
                self._insert(self.running, request)
                budget -= _take(chunks, request, budget)

    def _allocate(self, request: Request) -> _Admission:
        """Raises InvalidArgumentError or QuotaExceededError if no wait can help."""
        extra_keys = request.question.extra_keys
        found = self._cache.lookup(request.tokens, extra_keys=extra_keys)
        may_wait = request.wait_until_s is None or self._clock() < request.wait_until_s
        if found.num_pending_tokens and may_wait:
            return self._wait_pending(request)
        headroom = len(self.running)
        if headroom and found.num_blocks_needed + headroom > found.num_blocks_free:
            return _Admission.NO_ROOM
        was_admitted = request.num_cached_tokens is not None
        try:
            sequence = self._cache.sequence(
                request.tokens, extra_keys=extra_keys, resumed=was_admitted
            )
        except QuotaExceededError as error:
            if error.is_permanent:
                raise
            return _Admission.NO_ROOM
        except (ResourceExhaustedError, DrainingError):
            return _Admission.NO_ROOM
        if sequence.num_pending_tokens and may_wait:  # another engine was faster
            self._ended.append(sequence)
            self._free_ended()
            return self._wait_pending(request)
        request.sequence, request.wait_until_s = sequence, None
        if not was_admitted:
            request.num_cached_tokens = sequence.num_cached_tokens
        return _Admission.ADMITTED

    def _wait_pending(self, request: Request) -> _Admission:
        if request.wait_until_s is None:
            request.wait_until_s = self._clock() + self.limits.max_wait_pending_s
        return _Admission.PENDING

    def _wait_again(self, request: Request) -> None:
        self.running.remove(request)
        self._drop_sequence(request)
        self._insert(self.waiting, request)

    def _drop_sequence(self, request: Request) -> None:
        if request.sequence is not None:
            self._ended.append(request.sequence)
            request.sequence = None

    def _free_ended(self) -> None:
        if self._ended:
            self._cache.free(self._ended)
            self._ended = []

    def _insert(self, requests: list[Request], request: Request) -> None:
        bisect.insort(requests, request, key=_BY_ARRIVAL)


def _take(chunks: list[Chunk], request: Request, budget: int) -> int:
    """The next tokens of a request become a chunk; returns how many the budget allows."""
    left = request.new_tokens
    taken = left[:budget]
    if taken:
        start = len(request.tokens) - len(left)
        num_prompt_tokens = min(len(taken), max(0, len(request.question.prompt) - start))
        is_last = len(taken) == len(left)
        chunks.append(Chunk(request, taken, num_prompt_tokens, is_last))
    return len(taken)
