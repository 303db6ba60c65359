"""A stream of events of the cache, for asyncio: the twin of `sync_events`.

Owns the stream; what a response means is in `events`. One task at a time, but any may close it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from prefixcache.client.aio_replies import Replies
from prefixcache.client.events import CacheEvent, EventPosition, EventReader
from prefixcache.client.home_process import HomeProcess


class AsyncEventStream:
    """Events of the cache, in order, without end; made by `AsyncClient.watch_events`.

    `async with` closes it. Taking an event raises the error that ended the stream:
    UnavailableError when the daemon is gone, DrainingError when it is stopping, CancelledCallError
    once it was closed.
    """

    def __init__(self, replies: Any, home: HomeProcess) -> None:
        self._home = home
        self._replies = Replies(replies)
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
        return await self._replies.next()
