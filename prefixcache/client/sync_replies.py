"""The replies of a stream, for threads. `aio_replies` has its twin.

One thread at a time.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Any

import grpc

_LOOK_EVERY_S = 0.1
_PATIENCE_S = 1.0


class Replies:
    """stream: a call of gRPC's. Raises what it does.

    When a connection is refused at the moment at which a stream begins, gRPC may know how the
    stream has ended, and yet let who waits for its first reply wait for ever (1.85, once in about
    70 streams on a busy machine). So a thread of its own waits for that one; in that case it is
    never over.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._has_begun = False
        self._first: SimpleQueue[Any] | None = None

    def next(self) -> Any:
        """Raises StopIteration or RpcError once the stream has ended."""
        if self._has_begun:
            return next(self._stream)
        if self._first is None:
            self._first = SimpleQueue()
            reading = (self._stream, self._first)
            threading.Thread(target=_read, args=reading, name="first-reply", daemon=True).start()
        reply = self._wait_for(self._first)
        self._has_begun = True
        if isinstance(reply, Exception):
            raise reply
        return reply

    def cancel(self) -> None:
        self._stream.cancel()

    def _wait_for(self, first: SimpleQueue[Any]) -> Any:
        """The first reply, or what there is in place of it."""
        while True:
            has_ended = not self._stream.is_active()
            try:
                return first.get(timeout=_PATIENCE_S if has_ended else _LOOK_EVERY_S)
            except Empty:
                if has_ended:
                    is_ok = self._stream.code() is grpc.StatusCode.OK
                    return StopIteration() if is_ok else self._stream


def _read(stream: Any, into: SimpleQueue[Any]) -> None:
    try:
        into.put(next(stream))
    except (StopIteration, grpc.RpcError) as end:
        into.put(end)
