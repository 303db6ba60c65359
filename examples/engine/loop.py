"""The engine's thread: one step after another, for as long as there are requests.

Owns the requests from `submit` to their last `Delta`. A step schedules, runs the model once over
all chunks, and chooses a token for each request whose tokens are computed. When the daemon was
restarted, or cannot be reached, all requests wait and are computed anew: their answers go on with
the same tokens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from examples.engine.request import Delta, Request
from examples.engine.scheduler import Chunk, Scheduler, SequenceGoneError
from examples.engine.text import TextStream
from prefixcache.errors import (
    AbortedError,
    CancelledCallError,
    DeadlineExceededError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

LOOK_AGAIN_S = 0.02
"""Between steps when all requests wait for others."""
RETRY_S = 0.5
"""After the daemon could not be reached."""

_WITHOUT_DAEMON = (
    SequenceGoneError,
    NotFoundError,  # the session, or a sequence
    UnavailableError,
    DeadlineExceededError,
    CancelledCallError,
    ResourceExhaustedError,  # too many sessions, calls or streams at the moment
    AbortedError,
)

logger = logging.getLogger(__name__)


class EngineStoppedError(Exception):
    """The engine has ended, and serves no requests any more."""


class EngineFullError(Exception):
    """As many requests wait as may."""


class Runner(Protocol):
    """A model. In tests it needs none."""

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; returns the logits of the last of each, [chunks, vocabulary].

        K/V of full blocks are findable afterwards. Errors are the client's.
        """


@dataclass(slots=True)
class Counters:
    """computed_tokens: run through the model, those computed anew included.
    computed_prompt_tokens: of these, those of prompts. restarts: of all requests, after the daemon
    was lost.
    """

    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    restarts: int = 0


@dataclass(slots=True)
class _Answer:
    generator: torch.Generator
    text: TextStream


class Engine:
    """decode: token ids to text. end_tokens: each ends an answer and is no part of its text."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        decode: Callable[[Sequence[int]], str],
        end_tokens: Collection[int],
    ) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self._runner = runner
        self._decode = decode
        self._end_tokens = frozenset(end_tokens)
        self._arriving: SimpleQueue[Request] = SimpleQueue()
        self._has_news = threading.Event()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="engine")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the step that runs. Requests without an answer end with EngineStoppedError.

        May be called again.
        """
        with self._lock:
            self._is_open = False
        self.wake()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._is_open and self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted, or not any more. Any thread."""
        return len(self.scheduler.waiting) + self._arriving.qsize()

    def submit(self, requests: Sequence[Request]) -> None:
        """Any thread. Raises EngineStoppedError or EngineFullError; none is taken then."""
        with self._lock:
            if not self._is_open:
                raise EngineStoppedError("the engine has stopped")
            most = self.scheduler.limits.max_waiting
            if self.num_waiting + len(requests) > most:
                raise EngineFullError(f"{self.num_waiting} requests wait, and {most} may at most")
            for request in requests:
                self._arriving.put(request)
        self.wake()

    def wake(self) -> None:
        """There is something new: requests, or a caller that is gone. Any thread."""
        self._has_news.set()

    # ---- the thread

    def _serve(self) -> None:
        try:
            while self._is_open:
                self._has_news.clear()
                self._has_news.wait(self.serve_once())
        finally:
            with self._lock:
                self._is_open = False
            self._take_in()
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                error = EngineStoppedError("the engine has stopped")
                request.caller.tell(Delta(request.index, error=error))

    def serve_once(self) -> float | None:
        """One step. Returns how long to wait for news: None without a limit."""
        self._take_in()
        try:
            has_computed = self.step()
        except _WITHOUT_DAEMON as error:
            logger.warning("all requests are computed anew: %s", error)
            self.counters.restarts += 1
            self.scheduler.restart()
            return RETRY_S
        finally:
            for request, reason in self.scheduler.take_refused():
                request.caller.tell(Delta(request.index, error=reason))
        if has_computed:
            return 0
        return None if self.scheduler.is_idle else LOOK_AGAIN_S

    def _take_in(self) -> None:
        with self._lock, suppress(Empty):
            while True:
                self.scheduler.add(self._arriving.get_nowait())
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.caller.is_gone:
                self.scheduler.end(request)

    def step(self) -> bool:
        """Compute and choose. Returns False if there was nothing to compute."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        logits = self._runner.forward(chunks)
        self._count(chunks)
        for chunk, scores in zip(chunks, logits, strict=True):
            if chunk.is_last:
                for request in self.scheduler.fork(chunk.request):
                    self._go_on(request, scores)
        return True

    def _go_on(self, request: Request, scores: torch.Tensor) -> None:
        """Choose the next token of a choice, and tell its caller. scores: its logits."""
        question = request.question
        if request.answer is None:
            generator = question.sampling.generator(request.index, scores.device)
            request.answer = _Answer(generator, TextStream(self._decode, question.stop))
        text = request.answer.text
        token = question.sampling.next_token(scores, request.answer.generator)
        request.tokens.append(token)
        is_end = token in self._end_tokens
        added = "" if is_end else text.push(token)
        reason = None
        if is_end or text.is_stopped:
            reason = "stop"
        elif request.num_output_tokens == question.max_tokens:
            reason = "length"
        if reason is not None:
            added += text.finish()
            self.scheduler.end(request)
        self.counters.output_tokens += 1
        num_cached = request.num_cached_tokens or 0
        request.caller.tell(Delta(request.index, added, 1, reason, num_cached))

    def _count(self, chunks: Sequence[Chunk]) -> None:
        counters = self.counters
        counters.steps += 1
        for chunk in chunks:
            counters.computed_tokens += len(chunk.token_ids)
            counters.computed_prompt_tokens += chunk.num_prompt_tokens
