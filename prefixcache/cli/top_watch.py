"""Looks at a daemon again and again, one that goes away and comes back included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from prefixcache.cli.top_view import Screen, Seen
from prefixcache.core.history import History, Moment
from prefixcache.core.stats import PoolStats
from prefixcache.errors import PrefixCacheError
from prefixcache.types import SequenceOrder

if TYPE_CHECKING:
    from prefixcache.client import Client

NUM_INTERVALS = 600
"""Intervals of which there are rates: more than a terminal has columns."""


def look(client: Client, order: SequenceOrder, num_sequences: int) -> Seen:
    """Raises the client's errors. num_sequences: the most to ask for, 1 to 1000."""
    stats = client.stats()
    sequences = client.first_sequences(order, num_sequences)
    return Seen(stats, sequences, client.list_sessions(), order)


class Watch:
    """One thread at a time may look; `close` may be called from another.

    open_client: of the daemon. After a failure the next look is through a new client: gRPC's own
    pauses between attempts grow, and a daemon that has been restarted may have another layout.
    """

    def __init__(
        self,
        target: str,
        open_client: Callable[[], Client],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._open_client = open_client
        self._interval_s = interval_s
        self._clock = clock
        self._client: Client | None = None
        self._history = History(NUM_INTERVALS)
        self._last: Screen | None = None
        self._answered_s = clock()

    def look(self, order: SequenceOrder, num_sequences: int) -> Screen:
        """What there is to show now. Raises the client's errors until it has succeeded once."""
        try:
            if self._client is None:
                self._client = self._open_client()
            seen = look(self._client, order, num_sequences)
        except PrefixCacheError as error:
            self.close()
            if self._last is None:
                raise
            self._last = replace(self._last, problem=error.message)
            return self.now()
        self._answered_s = self._clock()
        self._add(seen)
        return self.now()

    def now(self) -> Screen:
        """The last look, as it stands now: the time without an answer goes on."""
        assert self._last is not None, "nothing has been seen yet"
        return replace(self._last, silent_s=self._clock() - self._answered_s)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _add(self, seen: Seen) -> None:
        stats = seen.stats
        counts = {
            name: getattr(stats, name)
            for name in ("referenced", "queries_tokens", "hit_tokens", "evictions", "requests")
        }
        num_calls = sum(call.ended for call in stats.calls)
        self._history.add(Moment.of(stats.uptime_s, counts, num_calls))
        before: PoolStats | None = self._last.seen.stats if self._last is not None else None
        if before is not None and before.uptime_s > stats.uptime_s:
            before = None
        self._last = Screen(
            target=self._target,
            seen=seen,
            before=before,
            history=self._history.intervals(),
            interval_s=self._interval_s,
        )
