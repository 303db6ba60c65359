"""A stream of engine steps, for asyncio: the twin of `sync_steps`.

Owns the stream; what is sent and what an answer means is in `step` and `unanswered_steps`. One
task at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

from prefixcache.client.aio_replies import Replies
from prefixcache.client.aio_sequence import AsyncSequence
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.step import Step
from prefixcache.client.unanswered_steps import UnansweredSteps
from prefixcache.errors import CancelledCallError, DeadlineExceededError, PrefixCacheError


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
        self._replies = Replies(open_stream(_until_none(self._requests)))

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
        try:
            return await self._replies.next()
        except PrefixCacheError as error:
            self._end(error)
            raise

    def _end(self, error: PrefixCacheError) -> None:
        self._steps.fail(error)
        if not self._home.is_here:
            return
        self._requests.put_nowait(None)
        self._replies.cancel()


async def _until_none(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (request := await queue.get()) is not None:
        yield request
