"""Read the K/V of one sequence out of the cache by its block table.

This is where a table becomes addresses: an index in int64 times a stride in elements. Pure.

The copy costs about as much as reading the memory once, and the matrix products after it run on
plain `[tokens, D]` matrices from the CPU's cache. Rejected: one gather of all sequences into a
padded tensor (10x slower in decode: it leaves the CPU's cache and computes on the padding).
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


def gather_tokens(cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """All slots of the given blocks in order, for each head: `[H, n * B, D] float32`.

    cache: `[N, H, B, D]`, any strides; block_ids: `[n] int64`. Slots that hold no token come
    along, whatever they contain: cut them off before computing.
    """
    num_blocks, num_heads, block_size, head_dim = cache.shape
    tile = block_size * head_dim
    block_stride, head_stride, token_stride, element_stride = cache.stride()
    if (token_stride, element_stride) == (head_dim, 1) and not (
        block_stride % tile or head_stride % tile
    ):
        # Each head's tile is a row of one matrix over the pool, and picking rows is a memcpy a
        # row: 2.4x faster than indexing the view.
        block_step, head_step = block_stride // tile, head_stride // tile
        num_rows = (num_blocks - 1) * block_step + (num_heads - 1) * head_step + 1
        rows = cache.as_strided((num_rows, tile), (tile, 1))
        heads = torch.arange(num_heads, device=cache.device)
        picked = rows.index_select(
            0, (block_ids * block_step + heads[:, None] * head_step).view(-1)
        )
    else:
        picked = cache.transpose(0, 1)[:, block_ids]
    return picked.reshape(num_heads, -1, head_dim).float()


def later_tokens(num_tokens: int, device: torch.device) -> torch.Tensor:
    """True where column token comes after row token: `[num_tokens, 1, num_tokens]` bool."""
    square = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    return square.triu_(1)[:, None]
