"""A stream of engine steps, for asyncio: the twin of `sync_steps`.

Owns the stream; what is sent and what an answer means is in `step` and `unanswered_steps`. One
task at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from prefixcache.client.aio_sequence import AsyncSequence
from prefixcache.client.cancelled_task import current_task_is_cancelled
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.step import Step
from prefixcache.client.unanswered_steps import UnansweredSteps
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    PrefixCacheError,
    UnavailableError,
)
from prefixcache.rpc.status import from_rpc_error

_LOOK_EVERY_S = 0.01
_SEND_FAILED = "Internal error from Core"
"""What gRPC says then, and only then."""


class AsyncStepStream:
    """Sends steps and gives them their answers, in order; made by `AsyncClient.steps`.

    When the stream breaks, every step without an answer fails with the error, as do later ones.
    It is then not known which of them the daemon has done: their calls may be made once more, on
    another stream or one by one, and what was done is answered again. A task that is cancelled
    while it waits breaks the stream. `async with` closes it.
    """

    def __init__(
        self,
        open_stream: Callable[[AsyncIterator[Any]], Any],
        steps: UnansweredSteps[AsyncSequence],
        timeout_s: float,
        home: HomeProcess,
    ) -> None:
        self._home = home
        self._steps = steps
        self._timeout_s = timeout_s
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._replies = open_stream(_until_none(self._requests))
        # An iterator gives what came before the end, where `read` raises the error at once.
        self._messages = aiter(self._replies)
        self._end_of_stream = _EndOfStream(self._replies)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def new_step(self) -> Step[AsyncSequence]:
        """A step to add calls to."""
        return self._steps.new_step()

    def send(self, step: Step[AsyncSequence]) -> None:
        """Send a step and do not wait for its answer.

        Raises FailedPreconditionError if one of its sequences has had another call since it was
        added to the step, and the error that broke the stream.
        """
        self._home.check()
        self._requests.put_nowait(self._steps.request_of(step))

    async def wait(self, step: Step[AsyncSequence], *, timeout_s: float | None = None) -> None:
        """Wait for the answer of a step that was sent, and so for those before it.

        timeout_s: as for the client's calls; DeadlineExceededError then, and the stream is
        broken. Raises the error that broke the stream; what became of the single calls say their
        results.
        """
        self._home.check()
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                while self._steps.has(step):
                    self._steps.answered(await self._receive())
        except TimeoutError:
            error = DeadlineExceededError("no answer to the step in time")
            self._end(error)
            raise error from None
        except asyncio.CancelledError:
            # The reply that is on its way can no longer be told from the next one.
            self._end(CancelledCallError("the task that waited for the step was cancelled"))
            raise

    async def run(self, step: Step[AsyncSequence], *, timeout_s: float | None = None) -> None:
        """`send` and `wait`."""
        self.send(step)
        await self.wait(step, timeout_s=timeout_s)

    async def close(self) -> None:
        """End the stream. Steps without an answer fail with CancelledCallError."""
        self._end(CancelledCallError("the stream is closed"))

    async def _receive(self) -> Any:
        error: PrefixCacheError
        try:
            return await anext(self._messages)
        except (StopAsyncIteration, grpc.RpcError):
            error = await self._end_of_stream.error()
        except asyncio.CancelledError:
            if current_task_is_cancelled():
                raise
            error = CancelledCallError("the client is closed")
        self._end(error)
        raise error

    def _end(self, error: PrefixCacheError) -> None:
        self._steps.fail(error)
        if not self._home.is_here:
            return
        self._requests.put_nowait(None)
        self._replies.cancel()


class _EndOfStream:
    """How the daemon ended a stream.

    When a send fails, gRPC says that the stream ended with an internal error. It may have said
    before what the daemon said, and then keeps that no longer; or it will, and calls nobody.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._error: PrefixCacheError | None = None
        stream.add_done_callback(self._look)

    async def error(self) -> PrefixCacheError:
        """For when the stream has no more replies."""
        while self._error is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._look(self._stream)
        return self._error

    def _look(self, stream: Any) -> None:
        if self._error is not None or not stream.done():
            return
        code, details = _now(stream.code()), _now(stream.details())
        if code is grpc.StatusCode.OK:
            self._error = UnavailableError("the daemon ended the stream")
        elif details != _SEND_FAILED:
            metadata = _now(stream.trailing_metadata())
            failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
            self._error = from_rpc_error(failure)


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, which it needs not wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


async def _until_none(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (request := await queue.get()) is not None:
        yield request
