"""Calls whose request has not come yet.

gRPC gives a call a thread as soon as its headers are there, and a peer that falls silent then would
keep the thread for ever. A call that waits can only be ended by cancelling it, from another thread:
`cut_late` is called now and then. Safe to use from many threads; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

_Message = TypeVar("_Message")

REQUEST_TIMEOUT_S = 5.0
"""A request that has not come so long after its headers is waited for no more."""


class Arrivals:
    """The unary calls of a server that wait for their request, and since when.

    A dict without a lock: each of its steps here is one of the interpreter's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[grpc.ServicerContext, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def request(
        self, messages: Iterator[_Message], context: grpc.ServicerContext
    ) -> _Message | None:
        """The one message of a call; None if the caller ends it without. Raises if it is cut."""
        self._waiting[context] = self._clock()
        try:
            return next(messages, None)
        finally:
            del self._waiting[context]

    def cut_late(self) -> None:
        oldest_s = self._clock() - REQUEST_TIMEOUT_S
        for context, since_s in list(self._waiting.items()):
            if since_s <= oldest_s:
                context.cancel()
