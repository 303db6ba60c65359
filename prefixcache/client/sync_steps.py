"""A stream of engine steps, for threads. `aio_steps` has its twin.

Owns the stream; what is sent and what an answer means is in `step` and `unanswered_steps`. One
thread at a time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import grpc

from prefixcache.client.home_process import HomeProcess
from prefixcache.client.step import Step
from prefixcache.client.sync_replies import Replies
from prefixcache.client.sync_sequence import Sequence
from prefixcache.client.unanswered_steps import UnansweredSteps
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    PrefixCacheError,
    UnavailableError,
)
from prefixcache.rpc.status import from_rpc_error

_LOOK_EVERY_S = 0.1


class StepStream:
    """Sends steps and gives them their answers, in order; made by `Client.steps`.

    When the stream breaks, every step without an answer fails with the error, as do later ones.
    It is then not known which of them the daemon has done: their calls may be made once more, on
    another stream or one by one, and what was done is answered again. `with` closes it.
    """

    def __init__(
        self,
        open_stream: Callable[[Iterator[Any]], Any],
        steps: UnansweredSteps[Sequence],
        timeout_s: float,
        home: HomeProcess,
    ) -> None:
        self._home = home
        self._steps = steps
        self._timeout_s = timeout_s
        self._requests: SimpleQueue[Any] = SimpleQueue()
        stream = open_stream(iter(self._requests.get, None))
        self._replies = Replies(stream)
        self._time_limit = _TimeLimit(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def new_step(self) -> Step[Sequence]:
        """A step to add calls to."""
        return self._steps.new_step()

    def send(self, step: Step[Sequence]) -> None:
        """Send a step and do not wait for its answer.

        Raises FailedPreconditionError if one of its sequences has had another call since it was
        added to the step, and the error that broke the stream.
        """
        self._home.check()
        self._requests.put(self._steps.request_of(step))

    def wait(self, step: Step[Sequence], *, timeout_s: float | None = None) -> None:
        """Wait for the answer of a step that was sent, and so for those before it.

        timeout_s: as for the client's calls; DeadlineExceededError then, and the stream is
        broken. Raises the error that broke the stream; what became of the single calls say their
        results.
        """
        self._home.check()
        with self._time_limit.of(self._timeout_s if timeout_s is None else timeout_s):
            while self._steps.has(step):
                self._steps.answered(self._receive())

    def run(self, step: Step[Sequence], *, timeout_s: float | None = None) -> None:
        """`send` and `wait`."""
        self.send(step)
        self.wait(step, timeout_s=timeout_s)

    def close(self) -> None:
        """End the stream. Steps without an answer fail with CancelledCallError."""
        self._end(CancelledCallError("the stream is closed"))

    def _receive(self) -> Any:
        error: PrefixCacheError
        try:
            return self._replies.next()
        except StopIteration:
            error = UnavailableError("the daemon ended the stream")
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            if self._time_limit.was_passed:
                error = DeadlineExceededError("no answer to the step in time")
        self._end(error)
        raise error

    def _end(self, error: PrefixCacheError) -> None:
        self._steps.fail(error)
        if not self._home.is_here:
            return
        self._requests.put(None)
        self._replies.cancel()


class _TimeLimit:
    """Cancels a stream on which an answer is late: gRPC waits for one without a limit.

    A thread looks ten times a second, as gRPC's own waits do, so that a wait costs no more than
    two assignments. It ends with the stream.
    """

    def __init__(self, stream: Any) -> None:
        self.was_passed = False
        self._stream = stream
        self._until_s = math.inf
        self._is_over = threading.Event()
        if stream.add_callback(self._is_over.set):
            threading.Thread(target=self._watch, name="step-time-limit", daemon=True).start()

    @contextmanager
    def of(self, timeout_s: float) -> Iterator[None]:
        self._until_s = time.monotonic() + timeout_s
        try:
            yield
        finally:
            self._until_s = math.inf

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            if time.monotonic() > self._until_s:
                self.was_passed = True
                self._stream.cancel()
                return
