"""WatchEvents: each watcher reads the events at its own pace, in a thread of its own.

Owns nothing but who is watching; `prefixcache.core.events` owns the events. A watcher that is
slower than their buffer goes round is told so and gets a new snapshot, and gRPC pulls a response
only when the one before has left: so nobody makes the core wait, or memory grow.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import grpc

from prefixcache.core.events import Event, EventLog, Reader, Removed, Stored
from prefixcache.core.sequences import Sequences
from prefixcache.core.snapshot import CachedBlocks
from prefixcache.errors import CancelledCallError, DrainingError, EventsGoneError, EventsOffError
from prefixcache.rpc._pb import admin_pb2
from prefixcache.rpc.wire import column32, repeated_bytes, twin

MAX_EVENT_STREAMS = 16
"""Watchers at the same time. A snapshot under way takes 100 bytes of each cached block."""
_MORE_ROOM = 1024
"""Blocks that may become cached while a snapshot gets its memory."""
_RUN_OVERHEAD_BYTES = 64

_CacheEvent = twin("CacheEvent")
_Response = twin("WatchEventsResponse")
_HASHES_FIELD = admin_pb2.BlocksStored.BLOCK_HASHES_FIELD_NUMBER
assert _HASHES_FIELD == admin_pb2.BlocksRemoved.BLOCK_HASHES_FIELD_NUMBER

_Responses = Iterator[Any]


class EventStreams:
    """Who watches. Safe to use from many threads."""

    def __init__(self, sequences: Sequences, boot_id: bytes) -> None:
        self._sequences = sequences
        self._boot_id = boot_id
        self._is_closing = False
        self._watchers: set[threading.Event] = set()

    def watch(
        self, request: admin_pb2.WatchEventsRequest, context: grpc.ServicerContext
    ) -> _Responses:
        """Responses to one caller, the first at once, until it has gone.

        Raises EventsOffError, EventsGoneError, and DrainingError once `close` was called.
        """
        log = self._sequences.pool.events
        if log is None:
            raise EventsOffError
        number = self._start(log, request)
        woken = threading.Event()
        self._watchers.add(woken)
        try:
            if not context.add_callback(woken.set):
                raise CancelledCallError("the caller has gone")
            yield from self._from(number, log, request.without_snapshot, context, woken)
        finally:
            self._watchers.discard(woken)
            with self._sequences.lock:
                log.forget(woken.set)

    def close(self) -> None:
        """All streams end, and others that begin."""
        self._is_closing = True
        for woken in list(self._watchers):
            woken.set()

    def _start(self, log: EventLog, request: admin_pb2.WatchEventsRequest) -> int | None:
        """The number to go on from; None for a snapshot."""
        with self._sequences.lock:
            first, end = log.first_number, log.next_number
        if not request.HasField("from_number"):
            return end if request.without_snapshot else None
        is_of_other = request.boot_id and request.boot_id != self._boot_id
        if is_of_other or not first <= request.from_number <= end:
            raise EventsGoneError(request.from_number, first, end)
        return request.from_number

    def _from(
        self,
        number: int | None,
        log: EventLog,
        without_snapshot: bool,
        context: grpc.ServicerContext,
        woken: threading.Event,
    ) -> _Responses:
        if number is None:
            number = yield from self._snapshot()
        else:
            yield self._response(number, ())
        while context.is_active():
            if self._is_closing:
                raise DrainingError
            with self._sequences.lock:
                first, events = log.first_number, log.read(number)
                if number < first:
                    log.num_gaps[Reader.WATCH] += 1
                elif not events:
                    log.wake_at_next(woken.set)
            if number < first:
                yield self._response(first, [_lost(number, first)])
                number = first
                if not without_snapshot:
                    number = yield from self._snapshot()
            elif events:
                number = events[-1].number + 1
                yield self._response(number, map(self._changed, events))
            else:
                woken.wait()
                woken.clear()

    def _snapshot(self) -> Generator[Any, None, int]:
        """Responses with all that is cached; returns the number of the first event after it."""
        pool, log = self._sequences.pool, self._sequences.pool.events
        assert log is not None
        cached = None
        while cached is None:
            size = min(pool.num_cached + _MORE_ROOM, pool.num_blocks)
            room = CachedBlocks.room_for(size, pool.digest_bytes)
            with self._sequences.lock:
                if pool.num_cached <= size:
                    cached, number = room.head(pool.copy_cached(room)), log.next_number
        start, end = _CacheEvent(number=number), _CacheEvent(number=number)
        start.snapshot_started.num_blocks = len(cached)
        end.snapshot_ended.SetInParent()
        events, num_bytes = [start], 0
        for run in cached.runs(log.max_event_bytes):
            events.append(self._stored(number, 0.0, run))
            num_bytes += len(run.hashes) + _RUN_OVERHEAD_BYTES
            if num_bytes >= log.max_event_bytes:
                yield self._response(number, events)
                events, num_bytes = [], 0
        yield self._response(number, [*events, end])
        return number

    def _response(self, next_number: int, events: Iterable[Any]) -> Any:
        return _Response(boot_id=self._boot_id, next_number=next_number, events=events)

    def _changed(self, event: Event) -> Any:
        number, time_s, change, _ = event
        if isinstance(change, Stored):
            return self._stored(number, time_s, change)
        message = _CacheEvent(number=number, time_s=time_s)
        if isinstance(change, Removed):
            message.removed.MergeFromString(self._hashes(change.hashes))
        else:
            message.cleared.SetInParent()
        return message

    def _stored(self, number: int, time_s: float, change: Stored) -> Any:
        message = _CacheEvent(number=number, time_s=time_s)
        stored = message.stored
        stored.MergeFromString(self._hashes(change.hashes))
        stored.parent_hash = change.parent or b""
        stored.token_ids = column32(change.token_ids)
        stored.block_size = self._sequences.pool.block_size
        stored.extra_keys.extend(change.extra_keys or ())
        return message

    def _hashes(self, hashes: bytes) -> bytes:
        return repeated_bytes(_HASHES_FIELD, hashes, self._sequences.pool.digest_bytes)


def _lost(number: int, end: int) -> Any:
    message = _CacheEvent(number=number)
    message.lost.end_number = end
    return message
