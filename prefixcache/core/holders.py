"""Who holds most of the pool, as a refusal for want of room says it.

Only those of the account that is refused are named: a tenant learns nothing of another's clients.
Refusals come in storms, so what they say is a picture that is made once for all accounts within
`MAX_AGE_S`: one step a live sequence, a few ten ns each. A count kept up to date instead would cost
every Append of every sequence something, and nearly all of them are not refused.

A sequence holds the blocks of its table. Blocks that sequences share count once for each: they stay
as long as one of them does. Guarded by the core's lock; the clock is injected.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from prefixcache.core.live import Held, LiveSequences
from prefixcache.core.sessions import owner_digest
from prefixcache.types import BlockHolder

MAX_AGE_S = 0.1
_NUM_NAMED = 3


class LargestHolders:
    def __init__(self, live: LiveSequences, clock: Callable[[], float]) -> None:
        self._live = live
        self._clock = clock
        self._found: dict[int, tuple[BlockHolder, ...]] = {}
        self._valid_until_s: float | None = None

    def largest(self, account: int) -> tuple[BlockHolder, ...]:
        """The owners in the account with the longest block tables, largest first, at most 3."""
        now = self._clock()
        if self._valid_until_s is None or now >= self._valid_until_s:
            self._found = self._look()
            self._valid_until_s = now + MAX_AGE_S
        return self._found.get(account, ())

    def _look(self) -> dict[int, tuple[BlockHolder, ...]]:
        by_account: dict[int, list[Held]] = {}
        for held in self._live.table_lengths():
            by_account.setdefault(held.account, []).append(held)
        return {
            account: tuple(map(self._named, heapq.nlargest(_NUM_NAMED, all_held, key=_num_blocks)))
            for account, all_held in by_account.items()
        }

    def _named(self, held: Held) -> BlockHolder:
        name = self._live.client_name(held.owner)
        return BlockHolder(name, owner_digest(held.owner), held.num_blocks)


def _num_blocks(held: Held) -> int:
    return held.num_blocks
