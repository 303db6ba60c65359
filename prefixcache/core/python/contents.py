"""The content of cached blocks, for verified hits: a collision of hashes is a miss.

Owned by the pool, which says when a block is written and entered. Guarded by the core's lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixcache.core.hashing import Chain
from prefixcache.types import BlockIds

ROOT_ENTRY = 0
"""Entry id that stands for NONE_HASH, the parent of first blocks."""


class Contents:
    """What verified hits compare: token ids, extra keys and the parent link of each cached block.

    The parent link is an entry id, given to each distinct chain node and never reused; a standby
    shares its node's entry id, so the link survives when it takes over.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._token_ids: npt.NDArray[np.uint32] = np.zeros(
            (num_blocks, block_size), dtype=np.uint32
        )
        self._entry: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._parent: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._extra_keys: dict[int, bytes] = {}
        self._last_entry = ROOT_ENTRY

    def num_equal(self, block_ids: BlockIds, chain: Chain) -> int:
        """How many blocks, from the first on, have the content of the chain."""
        count, size = len(block_ids), self._token_ids.shape[1]
        wanted = chain.token_ids[: count * size].reshape(count, size)
        parents = np.empty(count, dtype=np.int64)
        parents[0] = ROOT_ENTRY
        parents[1:] = self._entry[block_ids[:-1]]
        equal = (self._token_ids[block_ids] == wanted).all(axis=1)
        equal &= self._parent[block_ids] == parents
        if chain.extra_keys is not None or self._extra_keys:
            extra_keys = chain.extra_keys or [b""] * count
            for index, block in enumerate(block_ids.tolist()):
                equal[index] &= self._extra_keys.get(block, b"") == extra_keys[index]
        return count if equal.all() else int(equal.argmin())

    def write(self, block_ids: BlockIds, chain: Chain) -> None:
        """Keep the content of blocks that are about to be entered."""
        self._token_ids[block_ids] = chain.token_ids.reshape(len(block_ids), -1)
        if chain.extra_keys is None and not self._extra_keys:
            return
        extra_keys = chain.extra_keys or [b""] * len(block_ids)
        for block, keys in zip(block_ids.tolist(), extra_keys, strict=True):
            if keys:
                self._extra_keys[block] = keys
            else:
                self._extra_keys.pop(block, None)

    def enter(self, block_ids: BlockIds, parent: int | None) -> None:
        """Give each of consecutive blocks a node of its own, chained from `parent`."""
        count = len(block_ids)
        entries = np.arange(self._last_entry + 1, self._last_entry + 1 + count, dtype=np.int64)
        self._last_entry += count
        self._entry[block_ids] = entries
        self._parent[block_ids[1:]] = entries[:-1]
        self._parent[block_ids[0]] = self._entry_of(parent)

    def enter_as(self, block: int, holder: int, parent: int | None) -> bool:
        """Share the holder's node if that has the same content and parent."""
        same = (
            self._parent[holder] == self._entry_of(parent)
            and (self._token_ids[block] == self._token_ids[holder]).all()
            and self._extra_keys.get(block) == self._extra_keys.get(holder)
        )
        if same:
            self._entry[block] = self._entry[holder]
            self._parent[block] = self._parent[holder]
        return bool(same)

    def clear(self) -> None:
        self._extra_keys.clear()

    def _entry_of(self, parent: int | None) -> int:
        return ROOT_ENTRY if parent is None else int(self._entry[parent])
