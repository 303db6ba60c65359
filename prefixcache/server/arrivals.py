"""Calls whose request has not come yet.

gRPC gives a call a thread as soon as its headers are there, and a peer that falls silent then would
keep the thread for ever. A call that waits can only be ended by cancelling it, from another thread:
`cut_late` is called now and then. Until that, `num_late` says for how many of them other threads
have to stand in: headers cost a peer nothing, and it needs no credentials for a health check. Safe
to use from many threads; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import grpc

_Message = TypeVar("_Message")

REQUEST_TIMEOUT_S = 5.0
"""A request that has not come so long after its headers is waited for no more."""
PATIENCE_S = 0.2
"""A request that has not come so long after its headers is late: it is large, or its peer slow."""
MAX_LATE = 128
"""More late calls at the same time are cut at once, the oldest first."""


class _Waiting(NamedTuple):
    """threads: those of which one waits."""

    since_s: float
    threads: ThreadPoolExecutor


class Arrivals:
    """The unary calls of a server that wait for their request, and since when.

    A dict without a lock: each of its steps here is one of the interpreter's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[grpc.ServicerContext, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def request(
        self,
        messages: Iterator[_Message],
        context: grpc.ServicerContext,
        threads: ThreadPoolExecutor,
    ) -> _Message | None:
        """The one message of a call; None if the caller ends it without. Raises if it is cut.

        threads: those of which the calling one is.
        """
        self._waiting[context] = _Waiting(self._clock(), threads)
        try:
            return next(messages, None)
        finally:
            del self._waiting[context]

    def num_late(self, threads: ThreadPoolExecutor) -> int:
        """How many of these threads a slow or silent peer holds up."""
        return sum(call.threads is threads for _, call in self._longer_than(PATIENCE_S))

    def cut_late(self) -> None:
        late = self._longer_than(PATIENCE_S)
        num_cut = max(len(late) - MAX_LATE, len(self._longer_than(REQUEST_TIMEOUT_S)))
        for context, _ in late[:num_cut]:
            context.cancel()

    def _longer_than(self, seconds: float) -> list[tuple[grpc.ServicerContext, _Waiting]]:
        """Calls that have waited so long, those first that have waited longest."""
        oldest_s = self._clock() - seconds
        return [item for item in list(self._waiting.items()) if item[1].since_s <= oldest_s]
