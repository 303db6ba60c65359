"""Generating for many prompts at once: who runs, who waits, who makes room.

Owns the requests of one call of `CachedModel.stream` and their sequences, from the prompt to the
last token, and frees them whatever happens. In a pass each running request has its next token, or a
chunk of its prompt. Prompts begin in order, as soon as there is room; a prompt whose beginning
another one is computing waits for that and takes it from the cache. When a running request needs a
block and none is free, the youngest one gives up its own: what it has generated stays, and once
there is room it is allocated again and goes on, most of it from the cache.

One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Literal

import torch

from prefixcache.client import Client, Sequence, StepStream
from prefixcache.client.channel import DEFAULT_TIMEOUT_S
from prefixcache.errors import NoRoomError, PrefixCacheError, QuotaExceededError
from prefixcache.integrations.transformers.rows import Row, check_rows, commit_all, uncommitted
from prefixcache.integrations.transformers.sampling import Sampling
from prefixcache.types import AppendResult, ExtraKeys, ResultCode

FinishReason = Literal["stop", "length"]

_NO_ROOM = (ResultCode.NO_ROOM, ResultCode.QUOTA_EXCEEDED)
_LOOK_EVERY_S = 0.05
_WAIT_PENDING_S = 10.0
"""Longest wait of a prompt for what another sequence is computing."""


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """max_new_tokens: of each output. max_pass_tokens: of all rows of a pass together.
    wait_room_s: how long to wait when other clients hold the room for the only request.
    stop_token_ids: any of them ends an output, whose last token it is.
    """

    max_new_tokens: int
    max_pass_tokens: int
    wait_room_s: float
    stop_token_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Output:
    """One of the results of a call, as far as it has come."""

    index: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found when it was first allocated."""


@dataclass(slots=True, eq=False)
class _Request:
    """A sequence that runs or waits. It has several outputs until its prompt is computed."""

    token_ids: list[int]
    """The prompt and what was generated."""
    outputs: list[Output]
    extra_keys: ExtraKeys
    sequence: Sequence | None = None
    was_preempted: bool = False

    @property
    def running(self) -> Sequence:
        assert self.sequence is not None
        return self.sequence

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.running.num_computed_tokens


class Generation:
    """forward: `CachedModel.forward`, without its commit. max_fork_children: of one call."""

    def __init__(
        self,
        client: Client,
        forward: Callable[[list[Row]], torch.Tensor],
        sampling: Sampling,
        limits: GenerationLimits,
        *,
        max_fork_children: int,
    ) -> None:
        self._client = client
        self._forward = forward
        self._sampling = sampling
        self._limits = limits
        self._max_fork_children = max_fork_children
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        """In the order in which they were admitted: the last one is the youngest."""
        self._alive: set[Sequence] = set()
        self._is_full = False
        """There is no room for the next one before one that runs has finished."""
        self._refused_since: float | None = None
        self._pending_since: float | None = None

    def add(self, prompt: Items[int], outputs: list[Output], extra_keys: ExtraKeys) -> None:
        self._waiting.append(_Request(list(prompt), outputs, extra_keys))

    def run(self) -> Iterator[tuple[int, int]]:
        """Index of the output and token id, as they come."""
        with self._client.steps() as steps:
            try:
                while self._waiting or self._running:
                    self._admit()
                    rows, requests = self._next_rows()
                    logits = self._forward(rows)
                    computed = [
                        (request, logits[i])
                        for i, request in enumerate(requests)
                        if request.num_to_compute == 0
                    ]
                    yield from self._choose(computed)
                    self._go_on(steps, rows, [request for request, _ in computed])
            finally:
                if self._alive:
                    # After an error, or nobody wants more. They end with the session at the latest.
                    with suppress(PrefixCacheError):
                        self._client.free(list(self._alive))

    # ---- admission

    def _admit(self) -> None:
        """Allocate waiting requests in order, until one does not fit or is better kept waiting."""
        while self._waiting and not self._is_full:
            if len(self._running) >= self._limits.max_pass_tokens:
                return
            request = self._waiting[0]
            if self._running and self._is_pending(request):
                return
            try:
                self._allocate(request)
            except (NoRoomError, QuotaExceededError) as error:
                self._is_full = bool(self._running)
                if not self._running:
                    self._wait_for_room(error)
                continue
            self._running.append(self._waiting.popleft())

    def _allocate(self, request: _Request) -> None:
        wait_s = 0.0 if self._running else _WAIT_PENDING_S
        request.sequence = self._client.sequence(
            request.token_ids,
            extra_keys=request.extra_keys,
            resumed=request.was_preempted,
            wait_pending_s=wait_s,
            timeout_s=wait_s + DEFAULT_TIMEOUT_S,
        )
        self._alive.add(request.sequence)
        self._refused_since = self._pending_since = None
        if not request.was_preempted:
            for output in request.outputs:
                output.num_cached_tokens = request.sequence.num_cached_tokens

    def _is_pending(self, request: _Request) -> bool:
        """Whether another sequence, here or elsewhere, is computing what this one needs next."""
        found = self._client.lookup(request.token_ids, extra_keys=request.extra_keys)
        if not found.num_pending_tokens:
            return False
        now = monotonic()
        self._pending_since = self._pending_since or now
        return now - self._pending_since < _WAIT_PENDING_S

    def _wait_for_room(self, error: NoRoomError | QuotaExceededError) -> None:
        """Nothing of this call holds any: only others can make room."""
        now = monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= self._limits.wait_room_s:
            raise error
        sleep(_LOOK_EVERY_S)

    # ---- a pass

    def _next_rows(self) -> tuple[list[Row], list[_Request]]:
        """A token of each request that has one left, then chunks of prompts, as far as they go."""
        left = self._limits.max_pass_tokens
        rows, requests = [], []
        for request in sorted(self._running, key=lambda request: request.num_to_compute > 1):
            count = min(request.num_to_compute, left)
            left -= count
            if count:
                start = request.running.num_computed_tokens
                rows.append(Row(request.running, request.token_ids[start : start + count]))
                requests.append(request)
        return rows, requests

    def _choose(self, computed: list[tuple[_Request, torch.Tensor]]) -> Iterator[tuple[int, int]]:
        """The next token of each output."""
        for request, logits in computed:
            for output in request.outputs:
                token = self._sampling.next_token(logits, output.generator)
                output.token_ids.append(token)
                if token in self._limits.stop_token_ids:
                    output.finish_reason = "stop"
                elif len(output.token_ids) == self._limits.max_new_tokens:
                    output.finish_reason = "length"
                yield output.index, token

    # ---- after a pass

    def _go_on(self, steps: StepStream, rows: list[Row], computed: list[_Request]) -> None:
        """End what is finished, give the rest their next tokens, and commit the rows, in one step.

        A commit comes ahead of it only for a sequence that is freed in the step, or that forks.
        """
        for request in computed:
            request.outputs = [o for o in request.outputs if o.finish_reason is None]
        growing = [request for request in computed if request.outputs]
        finished = [request for request in computed if not request.outputs]
        if finished:
            self._running = [request for request in self._running if request not in finished]
            self._is_full = False
        commit_all(self._client, [r.running for r in computed if len(r.outputs) != 1])
        growing += [child for request in growing for child in self._forked(request)]
        for request in growing:
            request.token_ids.append(request.outputs[0].token_ids[-1])
        counts = uncommitted(row.sequence for row in rows)
        self._run_step(steps, [request.running for request in finished], counts, growing)

    def _forked(self, request: _Request) -> list[_Request]:
        """A request for each of its outputs but the first."""
        others, request.outputs = request.outputs[1:], request.outputs[:1]
        children = []
        for start in range(0, len(others), self._max_fork_children):
            batch = others[start : start + self._max_fork_children]
            for output, sequence in zip(batch, request.running.fork(len(batch)), strict=True):
                self._alive.add(sequence)
                children.append(
                    _Request(request.token_ids[:], [output], request.extra_keys, sequence)
                )
        self._running += children
        return children

    def _run_step(
        self,
        steps: StepStream,
        ended: list[Sequence],
        counts: dict[Sequence, int],
        growing: list[_Request],
    ) -> None:
        """counts: to commit. growing: get their last token; where one has no room, the youngest
        request makes some.
        """
        while ended or counts or growing:
            step = steps.new_step()
            if ended:
                step.free(ended)
            if counts:
                committed = step.commit(list(counts), list(counts.values()))
            if growing:
                grown = step.append(
                    [request.running for request in growing],
                    [request.token_ids[-1:] for request in growing],
                )
            steps.run(step)
            self._alive.difference_update(ended)
            if counts:
                check_rows(list(counts), committed.result())
            if growing:
                growing = _refused(growing, grown.result())
            counts, ended = {}, []
            if growing:
                victim = self._running.pop()
                growing = [request for request in growing if request is not victim]
                ended = [victim.running]
                victim.sequence, victim.was_preempted = None, True
                self._waiting.appendleft(victim)
                self._is_full = bool(self._running)


def _refused(requests: list[_Request], results: list[AppendResult]) -> list[_Request]:
    """Those without room. Raises the error of any other refusal."""
    refused = []
    for request, result in zip(requests, results, strict=True):
        if result.code in _NO_ROOM:
            refused.append(request)
        else:
            check_rows([request.running], [result])
    return refused
