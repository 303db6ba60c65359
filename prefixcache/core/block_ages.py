"""How old cached blocks get, how long they lie unused, and how soon evicted ones are missed.

The pool observes, in `BOUNDS_S` buckets, with one look at the clock for each of its calls:

    lifetime            of a block that is evicted: since it became findable. A standby that takes
                        over goes on with the age of the block before it.
    idle before evict   of the same block: since it was last used
    reuse gap           of a block that is hit by an Allocate: since it was last used
    evict to reuse      of a block that an Allocate asks for and that was evicted: since then

A block is *used* when it becomes findable, when it is hit, and when its last holder lets it go; if
a standby of it is let go, that counts too.

Times are kept in ticks of 1/64 s, in 32 bits, which is enough for ages of two years. Evicted blocks
are remembered as *ghosts* (the word of ARC, Megiddo and Modha 2003): 32 bits of the hash and the
time, in sets of 8 that other bits choose; a full set forgets its oldest. There is room for 5 ghosts
to 8 blocks: of the last evictions, as many as a fifth of the pool's blocks are, nearly all are
remembered. A hash is taken for another one with a chance of 2 ** -29: good enough for statistics.
A chain is evicted from its end, so the ghosts of deeper blocks are forgotten first: after
`MAX_GHOST_GAP` blocks without one the rest of a chain is not looked for, which saves most of the
work for prompts that were never seen.

When everything is dropped at once the ghosts go too. In their place 64 bits of the hash of each
block that is dropped are kept, until that happens again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from prefixcache.core.histogram import Histogram

TICKS_PER_S = 64
GHOST_WAYS = 8
MAX_GHOST_GAP = 8
BOUNDS_S = (
    *(0.125, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0),
    *(3600.0, 7200.0, 14400.0, 43200.0),
    *(86400.0, 259200.0, 604800.0),
)
"""Multiples of a tick; from 0.125 s to a week."""
BOUNDS_TICKS = tuple(int(bound * TICKS_PER_S) for bound in BOUNDS_S)


@dataclass(frozen=True, slots=True)
class BlockAges:
    """A snapshot, in seconds since the pool was made."""

    lifetime: Histogram
    idle_before_evict: Histogram
    reuse_gap: Histogram
    evict_to_reuse: Histogram


class BlockPast(NamedTuple):
    """What is remembered of a hash that is not cached.

    evicted_s: seconds since it was evicted to make room; None if no eviction is remembered.
    dropped_s: seconds since everything was dropped, it too; None if it was not there, or that never
    happened. is_complete: it was not evicted, from the start or since everything was dropped, if no
    eviction is remembered.
    """

    evicted_s: float | None
    dropped_s: float | None
    is_complete: bool


def num_ghost_sets(num_blocks: int) -> int:
    """Sets for 5 ghosts to 8 blocks, that is 5 bytes a block."""
    return max(1, 5 * num_blocks // (8 * GHOST_WAYS))


def histogram(counts: list[int], sum_ticks: int) -> Histogram:
    return Histogram(BOUNDS_S, tuple(counts), sum_ticks / TICKS_PER_S)
