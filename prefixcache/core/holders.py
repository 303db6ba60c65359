"""Who holds most of the pool, as a refusal for want of room says it.

Only those of the account that is refused are named: a tenant learns nothing of another's clients.
Refusals come in storms, so what they say is a picture that is made once an account within
`MAX_AGE_S`: one step for each of its live sequences and for each other owner, a few ten ns each. (A
picture for all accounts would tell by its age when another one was refused.) A count kept up to
date instead would cost every Append of every sequence something, and nearly all of them are not
refused.

A sequence holds the blocks of its table. Blocks that sequences share count once for each: they stay
as long as one of them does. Guarded by the core's lock; the clock is injected.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from prefixcache.core.live import Held, LiveSequences
from prefixcache.core.sessions import owner_digest
from prefixcache.types import BlockHolder

MAX_AGE_S = 0.1
_NUM_NAMED = 3


class _Picture(NamedTuple):
    valid_until_s: float
    holders: tuple[BlockHolder, ...]


class LargestHolders:
    def __init__(self, live: LiveSequences, clock: Callable[[], float]) -> None:
        self._live = live
        self._clock = clock
        self._found: dict[int, _Picture] = {}

    def largest(self, account: int) -> tuple[BlockHolder, ...]:
        """The owners in the account with the longest block tables, largest first, at most 3."""
        now = self._clock()
        found = self._found.get(account)
        if found is None or now >= found.valid_until_s:
            found = self._found[account] = _Picture(now + MAX_AGE_S, self._look(account))
        return found.holders

    def _look(self, account: int) -> tuple[BlockHolder, ...]:
        held = self._live.table_lengths(account)
        return tuple(map(self._named, heapq.nlargest(_NUM_NAMED, held, key=_num_blocks)))

    def _named(self, held: Held) -> BlockHolder:
        name = self._live.client_name(held.owner)
        return BlockHolder(name, owner_digest(held.owner), held.num_blocks)


def _num_blocks(held: Held) -> int:
    return held.num_blocks
