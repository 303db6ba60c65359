"""A stream of events of the cache, for threads. `aio_events` has its twin.

Owns the stream; what a response means is in `events`. One thread at a time, but any may close it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from prefixcache.client.events import CacheEvent, EventPosition, EventReader
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.sync_replies import Replies
from prefixcache.errors import UnavailableError
from prefixcache.rpc.status import from_rpc_error


class EventStream:
    """Events of the cache, in order, without end; made by `Client.watch_events`.

    `with` closes it. Taking an event raises the error that ended the stream: UnavailableError when
    the daemon is gone, DrainingError when it is stopping, CancelledCallError once it was closed.
    """

    def __init__(self, replies: Any, home: HomeProcess) -> None:
        self._home = home
        self._replies = Replies(replies)
        self._reader = EventReader()
        self._events: Iterator[CacheEvent] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CacheEvent:
        self._home.check()
        while (event := next(self._events, None)) is None:
            self._events = self._reader.events_of(self._receive())
        return event

    def position(self) -> EventPosition | None:
        """Where another stream can go on after the events taken so far.

        None before the daemon has answered, and in a snapshot that is not whole.
        """
        return self._reader.position

    def close(self) -> None:
        """End the stream."""
        if self._home.is_here:
            self._replies.cancel()

    def _receive(self) -> Any:
        try:
            return self._replies.next()
        except StopIteration:
            raise UnavailableError("the daemon ended the stream") from None
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from failure
