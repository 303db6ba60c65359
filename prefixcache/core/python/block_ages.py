"""`prefixcache.core.block_ages` in Python and numpy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from prefixcache.core.block_ages import (
    BOUNDS_TICKS,
    GHOST_WAYS,
    MAX_GHOST_GAP,
    TICKS_PER_S,
    BlockAges,
    BlockPast,
    histogram,
    num_ghost_sets,
)
from prefixcache.core.histogram import Histogram
from prefixcache.types import BlockHash, BlockIds

_MASK = 2**32 - 1
_BOUNDS = np.array(BOUNDS_TICKS, dtype=np.uint32)

Ticks = npt.NDArray[np.uint32]


class _AgeCounts:
    """A histogram of ages in ticks."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(len(BOUNDS_TICKS) + 1, dtype=np.int64)
        self._sum = 0

    def add(self, ages: Ticks) -> None:
        np.add.at(self._counts, np.searchsorted(_BOUNDS, ages), 1)
        self._sum += int(ages.sum(dtype=np.int64))

    def read(self) -> Histogram:
        return histogram(self._counts.tolist(), self._sum)


class Ages:
    """Times of blocks, and ghosts. `now` is a tick, 1 or more, as are all times."""

    def __init__(self, num_blocks: int) -> None:
        self._registered: Ticks = np.zeros(num_blocks, dtype=np.uint32)
        self._used: Ticks = np.zeros(num_blocks, dtype=np.uint32)
        self._num_sets = num_ghost_sets(num_blocks)
        self._ghosts = array("Q", bytes(8 * GHOST_WAYS * self._num_sets))
        self._dropped: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._dropped_at = 0
        self._lifetime = _AgeCounts()
        self._idle = _AgeCounts()
        self._reuse_gap = _AgeCounts()
        self._evict_to_reuse = _AgeCounts()

    def register(self, block_ids: BlockIds | int, now: int) -> None:
        """Blocks become findable."""
        self._registered[block_ids] = self._used[block_ids] = now

    def take_over(self, heir: int, block: int) -> None:
        """A standby has the place, and so the age, of a block that is taken."""
        self._registered[heir] = self._registered[block]

    def use(self, block_ids: BlockIds | int, now: int) -> None:
        self._used[block_ids] = now

    def hit(self, block_ids: BlockIds, now: int) -> None:
        self._reuse_gap.add(self._since(self._used[block_ids], now))
        self._used[block_ids] = now

    def evict(self, block_ids: BlockIds, hashes: Iterable[BlockHash], now: int) -> None:
        self._lifetime.add(self._since(self._registered[block_ids], now))
        self._idle.add(self._since(self._used[block_ids], now))
        for block_hash in hashes:
            self._add_ghost(block_hash, now)

    def miss(
        self, hashes: Iterable[BlockHash], now: int, is_cached: Callable[[BlockHash], bool]
    ) -> None:
        """The rest of a chain was asked for: which of its blocks were evicted?

        A ghost stays when its block comes back: if `is_cached`, it was not taken for a hit.
        """
        gap = 0
        for block_hash in hashes:
            ghost = self._ghost_of(block_hash)
            gap = gap + 1 if ghost is None else 0
            if gap == MAX_GHOST_GAP:
                break
            if ghost is not None and not is_cached(block_hash):
                self._evict_to_reuse.add(np.array([(now - ghost) & _MASK], dtype=np.uint32))

    def drop(self, hashes: Iterable[BlockHash], now: int) -> None:
        """These are all that was cached, and nothing is any more. Forgets the ghosts."""
        self._ghosts = array("Q", bytes(8 * GHOST_WAYS * self._num_sets))
        words = b"".join(block_hash[:8] for block_hash in hashes)
        self._dropped = np.frombuffer(words, dtype=np.uint64)
        self._dropped_at = now

    def past_of(self, block_hash: BlockHash, now: int) -> BlockPast:
        """What is remembered of a hash that is not cached."""
        ghost = self._ghost_of(block_hash)
        first, _ = self._set_of(block_hash)
        was_dropped = (self._dropped == np.frombuffer(block_hash[:8], dtype=np.uint64)).any()
        return BlockPast(
            None if ghost is None else (now - ghost & _MASK) / TICKS_PER_S,
            (now - self._dropped_at & _MASK) / TICKS_PER_S if was_dropped else None,
            not self._ghosts[first + GHOST_WAYS - 1],
        )

    def read(self) -> BlockAges:
        return BlockAges(
            self._lifetime.read(),
            self._idle.read(),
            self._reuse_gap.read(),
            self._evict_to_reuse.read(),
        )

    def _since(self, times: Ticks, now: int) -> Ticks:
        return np.uint32(now) - times

    def _set_of(self, block_hash: BlockHash) -> tuple[int, int]:
        """Where its set begins, and the bits that tell a ghost from its neighbours."""
        word = int.from_bytes(block_hash[:8], "little")
        return ((word & _MASK) * self._num_sets >> 32) * GHOST_WAYS, word >> 32

    def _ghost_of(self, block_hash: BlockHash) -> int | None:
        first, bits = self._set_of(block_hash)
        for ghost in self._ghosts[first : first + GHOST_WAYS]:
            if ghost and ghost >> 32 == bits:
                return ghost
        return None

    def _add_ghost(self, block_hash: BlockHash, now: int) -> None:
        first, bits = self._set_of(block_hash)
        # The newest stands first, so one that is there twice is found by its last eviction.
        end = first + GHOST_WAYS
        self._ghosts[first + 1 : end] = self._ghosts[first : end - 1]
        self._ghosts[first] = bits << 32 | now
