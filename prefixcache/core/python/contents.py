"""The content of cached blocks, for verified hits: a collision of hashes is a miss.

Owned by the pool, which says when a block is written and entered. Guarded by the core's lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixcache.core.hashing import Chain
from prefixcache.core.python.nodes import Nodes
from prefixcache.core.snapshot import ROOT_ENTRY
from prefixcache.types import BlockIds


class Contents:
    """What verified hits compare: token ids, extra keys and the parent link of each cached block.

    nodes: the pool's, which hold the parent links.
    """

    def __init__(self, num_blocks: int, block_size: int, nodes: Nodes) -> None:
        self._token_ids: npt.NDArray[np.uint32] = np.zeros(
            (num_blocks, block_size), dtype=np.uint32
        )
        self._nodes = nodes
        self._extra_keys: dict[int, bytes] = {}

    def num_equal(self, block_ids: BlockIds, chain: Chain) -> int:
        """How many blocks, from the first on, have the content of the chain."""
        count, size = len(block_ids), self._token_ids.shape[1]
        wanted = chain.token_ids[: count * size].reshape(count, size)
        parents = np.empty(count, dtype=np.int64)
        parents[0] = ROOT_ENTRY
        parents[1:] = self._nodes.entry[block_ids[:-1]]
        equal = (self._token_ids[block_ids] == wanted).all(axis=1)
        equal &= self._nodes.parent[block_ids] == parents
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

    def has_same(self, block: int, holder: int, parent: int | None) -> bool:
        """True if the holder has the content of a block that follows `parent`."""
        return bool(
            self._nodes.parent[holder] == self._nodes.entry_of(parent)
            and (self._token_ids[block] == self._token_ids[holder]).all()
            and self._extra_keys.get(block) == self._extra_keys.get(holder)
        )

    def tokens_of(self, block_ids: BlockIds) -> npt.NDArray[np.uint32]:
        """A copy, `[n, B]`."""
        return self._token_ids[block_ids]

    def keys_of(self, block: int) -> bytes:
        """The encoded extra keys, `b""` for none."""
        return self._extra_keys.get(block, b"")

    def clear(self) -> None:
        self._extra_keys.clear()
