"""Who holds most of the pool, as a refusal for want of room says it.

Only those of the account that is refused are named: a tenant learns nothing of another's clients.
Refusals come in storms, so what they say is a picture that is made once for all of them within
`MAX_AGE_S`: one step a live sequence, a few ten ns each. A count kept up to date instead would cost
every Append of every sequence something, and nearly all of them are not refused.

A sequence holds the blocks of its table. Blocks that sequences share count once for each: they stay
as long as one of them does. Guarded by the core's lock; the clock is injected.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from prefixcache.core.live import LiveSequences
from prefixcache.core.sessions import owner_digest
from prefixcache.types import BlockHolder

MAX_AGE_S = 0.1
_NUM_NAMED = 3


class LargestHolders:
    def __init__(self, live: LiveSequences, clock: Callable[[], float]) -> None:
        self._live = live
        self._clock = clock
        self._found: dict[int, tuple[BlockHolder, ...]] = {}
        self._valid_until_s: dict[int, float] = {}

    def largest(self, account: int) -> tuple[BlockHolder, ...]:
        """The owners in the account with the longest block tables, largest first, at most 3."""
        now = self._clock()
        if account not in self._found or now >= self._valid_until_s[account]:
            self._found[account] = self._look(account)
            self._valid_until_s[account] = now + MAX_AGE_S
        return self._found[account]

    def _look(self, account: int) -> tuple[BlockHolder, ...]:
        largest = heapq.nlargest(
            _NUM_NAMED, self._live.table_lengths(account), key=lambda held: held.num_blocks
        )
        return tuple(
            BlockHolder(
                self._live.client_name(held.owner), owner_digest(held.owner), held.num_blocks
            )
            for held in largest
        )
