"""The hash index: which block each hash finds, and which ones stand by for it.

Owned by the pool, which says when a block gets a hash and loses it. Guarded by the core's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.types import BlockHash, BlockIds

PLAIN, REGISTERED, STANDBY = 0, 1, 2


class Removed(NamedTuple):
    """What became of the places of registered blocks.

    gone: hashes that find nothing any more, by the block that they found. heirs: by each standby
    that took a place, the block that had it.
    """

    gone: dict[int, BlockHash]
    heirs: dict[int, int]


class HashIndex:
    """blocks: the registered block of each hash, in the order of registering.

    hash_of: of each block; None for a plain one. state: of each block, PLAIN, REGISTERED or
    STANDBY.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks: dict[BlockHash, int] = {}
        self.hash_of: list[BlockHash | None] = [None] * num_blocks
        self.state: npt.NDArray[np.uint8] = np.zeros(num_blocks, dtype=np.uint8)
        self._standbys: dict[BlockHash, list[int]] = {}

    def register(self, block_ids: BlockIds, hashes: Sequence[BlockHash]) -> BlockIds:
        """Register plain blocks up to the first whose hash is taken; returns those."""
        count = 0
        for block, block_hash in zip(block_ids.tolist(), hashes, strict=True):
            if self.blocks.setdefault(block_hash, block) != block:
                break
            self.hash_of[block] = block_hash
            count += 1
        registered = block_ids[:count]
        self.state[registered] = REGISTERED
        return registered

    def stand_by(self, block: int, block_hash: BlockHash) -> None:
        """Let a plain block stand by for the one that has its hash."""
        self._standbys.setdefault(block_hash, []).append(block)
        self.state[block] = STANDBY
        self.hash_of[block] = block_hash

    def remove(self, registered: BlockIds) -> Removed:
        """Blocks become plain; the longest standing standby of each, if any, takes its place."""
        self.state[registered] = PLAIN
        hash_of, standbys = self.hash_of, self._standbys
        gone: dict[int, BlockHash] = {}
        heirs: dict[int, int] = {}
        for block in registered.tolist():
            block_hash = hash_of[block]
            assert block_hash is not None
            hash_of[block] = None
            if block_hash in standbys:
                heir = standbys[block_hash][0]
                self._drop_standby(heir, block_hash)
                self.blocks[block_hash] = heir
                self.state[heir] = REGISTERED
                heirs[heir] = block
            else:
                del self.blocks[block_hash]
                gone[block] = block_hash
        return Removed(gone, heirs)

    def end_standby(self, block: int) -> int:
        """A standby becomes plain; returns the registered block of its hash."""
        block_hash = self.hash_of[block]
        assert block_hash is not None
        self.hash_of[block] = None
        self.state[block] = PLAIN
        self._drop_standby(block, block_hash)
        return self.blocks[block_hash]

    def clear(self) -> None:
        """All blocks become plain."""
        self.blocks.clear()
        self.hash_of = [None] * len(self.hash_of)
        self.state[:] = PLAIN
        self._standbys.clear()

    def _drop_standby(self, block: int, block_hash: BlockHash) -> None:
        standbys = self._standbys[block_hash]
        standbys.remove(block)
        if not standbys:
            del self._standbys[block_hash]
