"""A stream of engine steps, for asyncio: the twin of `sync_steps`.

Owns the stream and the order of the steps on it; what a step holds is in `step`. One task at a
time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio

from prefixcache.client.aio_sequence import AsyncSequence
from prefixcache.client.results import ServerInfo
from prefixcache.client.step import Step
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    FailedPreconditionError,
    PrefixCacheError,
    UnavailableError,
)
from prefixcache.rpc.status import from_rpc_error

if TYPE_CHECKING:
    from prefixcache.client.aio import AsyncClient


class AsyncStepStream:
    """Sends steps and gives them their answers, in order; made by `AsyncClient.steps`.

    When the stream breaks, every step without an answer fails with the error, as do later ones.
    It is then not known which of them the daemon has done: their calls may be made once more, on
    another stream or one by one, and what was done is answered again. `async with` closes it.
    """

    def __init__(self, client: AsyncClient, info: ServerInfo) -> None:
        self._client = client
        self._info = info
        self._sent: deque[Step[AsyncSequence]] = deque()
        self._sequence_ids: set[int] = set()
        self._error: PrefixCacheError | None = None
        self._call = client._stubs["Step"]()

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
        client = self._client
        return Step(
            client._owner,
            self._info,
            lambda state: AsyncSequence(client, state),
            self._sequence_ids,
        )

    async def send(self, step: Step[AsyncSequence]) -> None:
        """Send a step and do not wait for its answer."""
        if self._error is not None:
            raise self._error
        if step.was_sent:
            raise FailedPreconditionError("the step was sent before")
        step.was_sent = True
        self._sent.append(step)
        self._sequence_ids |= step.sequence_ids
        try:
            await self._call.write(step.request())
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self._receive(self._client._timeout_s)  # says why the stream is broken

    async def wait(self, step: Step[AsyncSequence], *, timeout_s: float | None = None) -> None:
        """Wait for the answer of a step that was sent, and so for those before it.

        timeout_s: as for the client's calls; DeadlineExceededError then, and the stream is
        broken. Raises the error that broke the stream; what became of the single calls say their
        results.
        """
        timeout_s = self._client._timeout_s if timeout_s is None else timeout_s
        while step in self._sent:
            self._take(await self._receive(timeout_s))
        if not step.was_sent:
            raise FailedPreconditionError("the step was not sent")
        if self._error is not None and not step.is_answered:
            raise self._error

    async def run(self, step: Step[AsyncSequence], *, timeout_s: float | None = None) -> None:
        """`send` and `wait`."""
        await self.send(step)
        await self.wait(step, timeout_s=timeout_s)

    async def close(self) -> None:
        """End the stream. Steps without an answer fail with CancelledCallError."""
        if self._error is None:
            self._break(CancelledCallError("the stream is closed"))
        self._call.cancel()

    async def _receive(self, timeout_s: float) -> Any:
        try:
            reply = await asyncio.wait_for(self._call.read(), timeout_s)
            if reply is not grpc.aio.EOF:
                return reply
            error: PrefixCacheError = UnavailableError("the daemon ended the stream")
        except TimeoutError:
            self._call.cancel()
            error = DeadlineExceededError("no answer to the step in time")
        except asyncio.CancelledError:
            # The reply that is on its way can no longer be told from the next one.
            self._break(CancelledCallError("the task that waited for the step was cancelled"))
            self._call.cancel()
            raise
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
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
