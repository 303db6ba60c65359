"""Read the K/V of one sequence out of the cache by its block table.

This is where a table becomes addresses: an index in int64 times a stride in elements. A reader
belongs to one thread; the cache is only read.

The copy costs about as much as reading the memory once, and the arithmetic after it runs on plain
`[tokens, D]` matrices. Rejected: one gather of all sequences into a padded tensor (10x slower in
decode: it leaves the CPU's cache and computes on the padding).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def used_block_ids(
    block_table: npt.NDArray[np.int32], seq_len: int, block_size: int, device: torch.device
) -> torch.Tensor:
    """The entries of one row of the block tables that hold tokens: `[ceil(seq_len / B)] int64`."""
    num_used = -(-seq_len // block_size)
    return torch.from_numpy(block_table[:num_used].astype(np.int64)).to(device)


class BlockReader:
    """Reads up to `max_blocks` blocks at a time, into memory that it uses again and again.

    cache: `[N, H, B, D]`, any strides. Fresh memory for each read would cost more than the read:
    the allocator returns blocks of this size to the system, and every page faults again.
    """

    def __init__(self, cache: torch.Tensor, max_blocks: int) -> None:
        self._cache = cache
        num_blocks, num_heads, block_size, head_dim = cache.shape
        self.num_heads = num_heads
        tile = block_size * head_dim
        block_stride, head_stride, token_stride, element_stride = cache.stride()
        self._rows: torch.Tensor | None = None
        if (token_stride, element_stride) == (head_dim, 1) and not (
            block_stride % tile or head_stride % tile
        ):
            # Each head's tile is a row of one matrix over the pool, and picking rows is a memcpy
            # a row: 2.4x faster than indexing the view.
            self._block_step = block_stride // tile
            head_step = head_stride // tile
            num_rows = (num_blocks - 1) * self._block_step + (num_heads - 1) * head_step + 1
            self._rows = cache.as_strided((num_rows, tile), (tile, 1))
            self._head_offsets = torch.arange(num_heads, device=cache.device)[:, None] * head_step
            self._picked = self._rows.new_empty(num_heads * max_blocks, tile)
        self._floats = cache.new_empty(
            0 if cache.dtype == torch.float32 else num_heads * max_blocks * tile,
            dtype=torch.float32,
        )

    def read(self, block_ids: torch.Tensor) -> torch.Tensor:
        """All slots of the given blocks in order, for each head: `[H, n * B, D] float32`.

        block_ids: `[n] int64`. Valid until the next read. Slots that hold no token come along,
        whatever they contain: cut them off before computing.
        """
        _, _, block_size, head_dim = self._cache.shape
        if self._rows is None:
            picked = self._cache.transpose(0, 1)[:, block_ids]
        else:
            index = (block_ids * self._block_step + self._head_offsets).view(-1)
            picked = self._picked[: len(index)]
            torch.index_select(self._rows, 0, index, out=picked)
        picked = picked.reshape(self.num_heads, len(block_ids) * block_size, head_dim)
        if picked.dtype == torch.float32:
            return picked
        return self._floats[: picked.numel()].view(picked.shape).copy_(picked)
