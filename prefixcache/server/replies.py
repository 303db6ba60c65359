"""Replies that their callers have not read yet.

A call's thread is free as soon as the reply is made, but gRPC keeps the bytes until the caller
takes them, and one that makes many calls and reads nothing would fill the memory. A reply that
waits can only be given up by cancelling its call: `leaves` does that to the oldest when too many
bytes wait, and `cut_late`, called now and then, to those that wait too long. Safe to use from many
threads; the clock is injected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import grpc

LARGE_REPLY_BYTES = 2**12
"""Smaller ones do not count here: the streams of a connection are limited, and connections."""
UNREAD_TIMEOUT_S = 30.0
"""A reply that its caller has not taken so long after it was made is given up."""


class _Reply(NamedTuple):
    num_bytes: int
    since_s: float


class Replies:
    """max_bytes: of all large replies that wait; one alone may be larger."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[grpc.ServicerContext, _Reply] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def are_too_many(self) -> bool:
        """More bytes wait than may: calls that were cut have not ended."""
        return self._num_bytes > self._max_bytes and len(self._waiting) > 1

    def leaves(self, context: grpc.ServicerContext, num_bytes: int) -> None:
        """A call's reply is on its way from now on."""
        if num_bytes < LARGE_REPLY_BYTES:
            return
        with self._lock:
            unread = self._oldest_beyond(self._max_bytes - num_bytes)
            self._waiting[context] = _Reply(num_bytes, self._clock())
            self._num_bytes += num_bytes
        for other in unread:
            other.cancel()
        if not context.add_callback(lambda: self._has_ended(context)):
            self._has_ended(context)

    def cut_late(self) -> None:
        oldest_s = self._clock() - UNREAD_TIMEOUT_S
        with self._lock:
            late = [
                context for context, reply in self._waiting.items() if reply.since_s <= oldest_s
            ]
        for context in late:
            context.cancel()

    def _oldest_beyond(self, max_bytes: int) -> list[grpc.ServicerContext]:
        """Those without which the others have `max_bytes` at most."""
        found: list[grpc.ServicerContext] = []
        num_bytes = self._num_bytes
        for context, reply in self._waiting.items():
            if num_bytes <= max_bytes:
                break
            found.append(context)
            num_bytes -= reply.num_bytes
        return found

    def _has_ended(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            reply = self._waiting.pop(context, None)
            if reply is not None:
                self._num_bytes -= reply.num_bytes
