"""A stream of engine steps, for threads. `aio_steps` has its twin.

Owns the stream and the order of the steps on it; what a step holds is in `step`. One thread at a
time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from prefixcache.client.results import ServerInfo
from prefixcache.client.step import Step
from prefixcache.client.sync_sequence import Sequence
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    FailedPreconditionError,
    PrefixCacheError,
    UnavailableError,
)
from prefixcache.rpc.status import from_rpc_error

if TYPE_CHECKING:
    from prefixcache.client.sync import Client

_LONGEST_SLEEP_S = 60.0


class StepStream:
    """Sends steps and gives them their answers, in order; made by `Client.steps`.

    When the stream breaks, every step without an answer fails with the error, as do later ones.
    It is then not known which of them the daemon has done: their calls may be made once more, on
    another stream or one by one, and what was done is answered again. `with` closes it.
    """

    def __init__(self, client: Client, info: ServerInfo) -> None:
        self._client = client
        self._info = info
        self._sent: deque[Step[Sequence]] = deque()
        self._sequence_ids: set[int] = set()
        self._error: PrefixCacheError | None = None
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._replies = client._stubs["Step"](iter(self._requests.get, None))
        self._watchdog = _Watchdog(self._replies.cancel)

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
        client = self._client
        return Step(
            client._owner,
            self._info,
            lambda state: Sequence(client, state),
            self._sequence_ids,
        )

    def send(self, step: Step[Sequence]) -> None:
        """Send a step and do not wait for its answer."""
        if self._error is not None:
            raise self._error
        if step.was_sent:
            raise FailedPreconditionError("the step was sent before")
        step.was_sent = True
        self._sent.append(step)
        self._sequence_ids |= step.sequence_ids
        self._requests.put(step.request())

    def wait(self, step: Step[Sequence], *, timeout_s: float | None = None) -> None:
        """Wait for the answer of a step that was sent, and so for those before it.

        timeout_s: as for the client's calls; DeadlineExceededError then, and the stream is
        broken. Raises the error that broke the stream; what became of the single calls say their
        results.
        """
        self._watchdog.start(self._client._timeout_s if timeout_s is None else timeout_s)
        try:
            while step in self._sent:
                self._take(self._receive())
        finally:
            self._watchdog.stop()
        if not step.was_sent:
            raise FailedPreconditionError("the step was not sent")
        if self._error is not None and not step.is_answered:
            raise self._error

    def run(self, step: Step[Sequence], *, timeout_s: float | None = None) -> None:
        """`send` and `wait`."""
        self.send(step)
        self.wait(step, timeout_s=timeout_s)

    def close(self) -> None:
        """End the stream. Steps without an answer fail with CancelledCallError."""
        if self._error is None:
            self._break(CancelledCallError("the stream is closed"))
        self._requests.put(None)
        self._replies.cancel()
        self._watchdog.end()

    def _receive(self) -> Any:
        try:
            return next(self._replies)
        except StopIteration:
            error: PrefixCacheError = UnavailableError("the daemon ended the stream")
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            if self._watchdog.has_fired:
                error = DeadlineExceededError("no answer to the step in time")
        self._break(error)
        raise error

    def _take(self, reply: Any) -> None:
        step = self._sent.popleft()
        self._sequence_ids -= step.sequence_ids
        step.answer(reply)

    def _break(self, error: PrefixCacheError) -> None:
        self._error = error
        for step in self._sent:
            step.fail(error)
            self._client._lost.add(step.request_ids)
        self._sent.clear()
        self._sequence_ids.clear()


class _Watchdog:
    """Calls `fire` once if a wait takes too long; gRPC's streams wait without a limit.

    A wait costs two assignments: the thread sleeps until the earliest time at which one could be
    over and looks again then. It is made for the first wait.
    """

    def __init__(self, fire: Callable[[], object]) -> None:
        self._fire = fire
        self._until: float | None = None
        self._wakes_at = float("inf")
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self.has_fired = False

    def start(self, timeout_s: float) -> None:
        self._until = until = time.monotonic() + timeout_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="step-timeout", daemon=True)
            self._wakes_at = until
            self._thread.start()
        elif until < self._wakes_at:
            with self._condition:
                self._condition.notify()

    def stop(self) -> None:
        self._until = None

    def end(self) -> None:
        with self._condition:
            self._has_ended = True
            self._condition.notify()

    def _run(self) -> None:
        with self._condition:
            while not self._has_ended:
                until, now = self._until, time.monotonic()
                if until is not None and until <= now:
                    self.has_fired = True
                    self._fire()
                    return
                # In this order: a wait that starts meanwhile either is seen here or sees that it
                # has to wake this thread.
                self._wakes_at = now + _LONGEST_SLEEP_S
                until = self._until
                if until is not None:
                    self._wakes_at = min(until, self._wakes_at)
                self._condition.wait(self._wakes_at - now)
