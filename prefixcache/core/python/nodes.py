"""Which node of the hash chain each cached block is, and which one is its parent.

Kept for verified hits, which compare parents, and for events, whose snapshots put parents before
children. Owned by the pool. Guarded by the core's lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixcache.core.snapshot import ROOT_ENTRY
from prefixcache.types import BlockIds


class Nodes:
    """`entry[block]` is the entry id of its node, `parent[block]` that of its parent's.

    Entry ids are given to each distinct chain node, parents before children, and never reused; a
    standby shares its node's entry id, so the link survives when it takes over.
    """

    def __init__(self, num_blocks: int) -> None:
        self.entry: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self.parent: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._last_entry = ROOT_ENTRY

    def enter(self, block_ids: BlockIds, parent: int | None) -> None:
        """Give each of consecutive blocks a node of its own, chained from `parent`."""
        count = len(block_ids)
        entries = np.arange(self._last_entry + 1, self._last_entry + 1 + count, dtype=np.int64)
        self._last_entry += count
        self.entry[block_ids] = entries
        self.parent[block_ids[1:]] = entries[:-1]
        self.parent[block_ids[0]] = self.entry_of(parent)

    def share(self, block: int, holder: int) -> None:
        """The block is of the holder's node."""
        self.entry[block] = self.entry[holder]
        self.parent[block] = self.parent[holder]

    def entry_of(self, block: int | None) -> int:
        return ROOT_ENTRY if block is None else int(self.entry[block])
