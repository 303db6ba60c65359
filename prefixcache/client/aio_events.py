"""A stream of events of the cache, for asyncio: the twin of `sync_events`.

Owns the stream; what a response means is in `events`. One task at a time, but any may close it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from prefixcache.client.cancelled_task import current_task_is_cancelled
from prefixcache.client.events import CacheEvent, EventPosition, EventReader
from prefixcache.client.home_process import HomeProcess
from prefixcache.errors import CancelledCallError, UnavailableError
from prefixcache.rpc.status import from_rpc_error


class AsyncEventStream:
    """Events of the cache, in order, without end; made by `AsyncClient.watch_events`.

    `async with` closes it. Taking an event raises the error that ended the stream:
    UnavailableError when the daemon is gone, DrainingError when it is stopping, CancelledCallError
    once it was closed.
    """

    def __init__(self, replies: Any, home: HomeProcess) -> None:
        self._home = home
        self._replies = replies
        self._reader = EventReader()
        self._events: Iterator[CacheEvent] = iter(())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CacheEvent:
        self._home.check()
        while (event := next(self._events, None)) is None:
            self._events = self._reader.events_of(await self._receive())
        return event

    def position(self) -> EventPosition | None:
        """Where another stream can go on after the events taken so far.

        None before the daemon has answered, and in a snapshot that is not whole.
        """
        return self._reader.position

    async def close(self) -> None:
        """End the stream."""
        if self._home.is_here:
            self._replies.cancel()

    async def _receive(self) -> Any:
        try:
            reply = await self._replies.read()
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from failure
        except asyncio.CancelledError:
            if current_task_is_cancelled():
                raise
            raise CancelledCallError("the stream is closed") from None
        if reply is grpc.aio.EOF:
            raise UnavailableError("the daemon ended the stream")
        return reply
