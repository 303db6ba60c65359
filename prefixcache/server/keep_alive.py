"""KeepAlive streams: which session each is of, and which of them are of no use any more.

Owns the open streams; `prefixcache.core.sessions` owns what their beats and ends mean. A stream
that waits for a message can only be ended by cancelling it, from another thread: `cut_stale` is
called now and then. Safe to use from many threads; the clock is injected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from prefixcache.core.sequences import Sequences
from prefixcache.errors import CancelledCallError, InvalidArgumentError
from prefixcache.rpc._pb import session_pb2
from prefixcache.server import checks
from prefixcache.server.callers import Caller

FIRST_BEAT_TIMEOUT_S = 5.0
"""A stream that has said nothing for so long after its start is cancelled."""

Beat = Callable[[session_pb2.KeepAliveRequest], session_pb2.KeepAliveResponse]


@dataclass(eq=False, slots=True)
class _Stream:
    """number: of the session's streams; None before the first message."""

    cancel: Callable[[], object]
    caller: Caller
    opened_at_s: float
    session_id: bytes = b""
    number: int | None = None


class KeepAliveStreams:
    def __init__(self, sequences: Sequences, boot_id: bytes, clock: Callable[[], float]) -> None:
        self._sequences = sequences
        self._boot_id = boot_id
        self._clock = clock
        self._lock = threading.Lock()
        self._open: set[_Stream] = set()

    @contextmanager
    def opened(self, cancel: Callable[[], object], caller: Caller) -> Iterator[Beat]:
        """A stream is open meanwhile; gives what answers its messages. `cancel` ends it."""
        stream = _Stream(cancel, caller, self._clock())
        with self._lock:
            self._open.add(stream)
        try:
            yield partial(self._beat, stream)
        finally:
            with self._lock:
                self._open.discard(stream)
            if stream.number is not None:
                with self._sequences.lock:
                    self._sequences.live.sessions.disconnect(stream.session_id, stream.number)

    def cut_stale(self) -> None:
        """Cancel streams that never said a word, and those whose session has ended or another."""
        oldest_s = self._clock() - FIRST_BEAT_TIMEOUT_S
        with self._lock:
            streams = list(self._open)
        with self._sequences.lock:
            stale = [stream for stream in streams if self._is_stale(stream, oldest_s)]
        for stream in stale:
            stream.cancel()

    def cut_all(self) -> None:
        with self._lock:
            streams = list(self._open)
        for stream in streams:
            stream.cancel()

    def _is_stale(self, stream: _Stream, oldest_s: float) -> bool:
        if stream.number is None:
            return stream.opened_at_s <= oldest_s
        sessions = self._sequences.live.sessions
        return not sessions.is_connected(stream.session_id, stream.number)

    def _beat(
        self, stream: _Stream, request: session_pb2.KeepAliveRequest
    ) -> session_pb2.KeepAliveResponse:
        session_id = checks.session_id(request.session_id, stream.caller)
        sessions = self._sequences.live.sessions
        with self._sequences.lock:
            if stream.number is None:
                stream.number = sessions.connect(session_id)
                stream.session_id = session_id
            elif session_id != stream.session_id:
                raise InvalidArgumentError("session_id", "is not the one of the first message")
            session = sessions.renew(session_id)
            if session.stream != stream.number:
                raise CancelledCallError("another stream of the session has taken its place")
        return session_pb2.KeepAliveResponse(ttl_s=session.ttl_s, boot_id=self._boot_id)
