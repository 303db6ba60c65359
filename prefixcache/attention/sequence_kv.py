"""Read the K/V of one sequence out of the cache by its block table, as float32.

This is where a table becomes addresses (an index in int64 times a stride in elements), and where
stored numbers become K/V: scales are applied here, and latents are read once for K and V. A reader
belongs to one thread; the cache is only read.

The copy costs about as much as reading the memory once, and the arithmetic after it runs on plain
`[tokens, D]` matrices. Rejected: one gather of all sequences into a padded tensor (10x slower in
decode: it leaves the CPU's cache and computes on the padding).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.storage.kv_cache import KVCache, KVScales


@dataclass(frozen=True, slots=True)
class KVTile:
    """K and V of consecutive tokens, the first of them at position `first`.

    keys: `[Hkv, n, D] float32`, values: `[Hkv, n, Dv] float32`.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def end(self) -> int:
        return self.first + self.keys.shape[1]


class KVReader:
    """Reads up to `max_blocks` blocks at a time, into memory that it uses again and again.

    Fresh memory for each read would cost more than the read: the allocator returns blocks of this
    size to the system, and every page faults again.
    """

    def __init__(self, cache: KVCache, max_blocks: int) -> None:
        self.num_kv_heads = cache.keys.shape[1]
        self.value_dim = cache.values.shape[3]
        self._block_size = cache.keys.shape[2]
        self._max_blocks = max_blocks
        self.tile_tokens = max_blocks * self._block_size
        self._is_latent = cache.is_latent
        key_scales = value_scales = None
        if cache.scales is not None:
            key_scales, value_scales = cache.scales.keys, cache.scales.values
        self._keys = _TensorReader(cache.keys, key_scales, max_blocks)
        if not cache.is_latent:
            self._values = _TensorReader(cache.values, value_scales, max_blocks)

    def tiles(self, block_table: npt.NDArray[np.int32], start: int, end: int) -> Iterator[KVTile]:
        """K/V of the positions from `start` to before `end` in order, some blocks at a time.

        Only blocks that hold such positions are read. Each tile is valid until the next one, and
        holds no slot of any other token.
        """
        size = self._block_size
        ids = torch.from_numpy(block_table[: -(-end // size)].astype(np.int64))
        ids = ids.to(self._keys.device)
        for block in range(start // size, len(ids), self._max_blocks):
            block_ids = ids[block : block + self._max_blocks]
            first = max(start, block * size)
            # Cut V as well as K: a weight of 0 does not cancel a NaN in an unused slot.
            tokens = slice(first - block * size, end - block * size)
            keys = self._keys.read(block_ids)[:, tokens]
            if self._is_latent:
                values = keys[..., : self.value_dim]
            else:
                values = self._values.read(block_ids)[:, tokens]
            yield KVTile(first, keys, values)


def select_heads(cache: KVCache, heads: slice) -> KVCache:
    """A view of some KV heads."""
    scales = cache.scales
    if scales is not None:
        scales = KVScales(scales.keys[:, heads], scales.values[:, heads], scales.fixed)
    return KVCache(cache.keys[:, heads], cache.values[:, heads], scales, cache.is_latent)


class _TensorReader:
    """K, or V. stored: `[N, H, B, D]`, scales: `[N, H, B] float32`, of any strides."""

    def __init__(self, stored: torch.Tensor, scales: torch.Tensor | None, max_blocks: int) -> None:
        self._stored = stored
        self._scales = scales
        num_blocks, num_heads, block_size, head_dim = stored.shape
        tile = block_size * head_dim
        block_stride, head_stride, token_stride, element_stride = stored.stride()
        self._rows: torch.Tensor | None = None
        if (token_stride, element_stride) == (head_dim, 1) and not (
            block_stride % tile or head_stride % tile
        ):
            # Each head's tile is a row of one matrix over the pool, and picking rows is a memcpy
            # a row: 2.4x faster than indexing the view.
            self._block_step = block_stride // tile
            head_step = head_stride // tile
            num_rows = (num_blocks - 1) * self._block_step + (num_heads - 1) * head_step + 1
            self._rows = stored.as_strided((num_rows, tile), (tile, 1))
            self._head_offsets = torch.arange(num_heads, device=stored.device)[:, None] * head_step
            self._picked = self._rows.new_empty(num_heads * max_blocks, tile)
        self._floats = stored.new_empty(
            0 if stored.dtype == torch.float32 else num_heads * max_blocks * tile,
            dtype=torch.float32,
        )
        self._float8: torch.Tensor | None = None
        if stored.dtype == torch.float8_e4m3fn:
            # Looking numbers up is 5x faster than torch's conversion.
            every_byte = torch.arange(256, dtype=torch.uint8, device=stored.device)
            self._float8 = every_byte.view(stored.dtype).float()

    @property
    def device(self) -> torch.device:
        return self._stored.device

    def read(self, block_ids: torch.Tensor) -> torch.Tensor:
        """All slots of the given blocks in order, for each head: `[H, n * B, D] float32`.

        block_ids: `[n] int64`. Slots that hold no token come along, whatever they contain.
        """
        _, num_heads, block_size, head_dim = self._stored.shape
        if self._rows is None:
            picked = self._stored.transpose(0, 1)[:, block_ids]
        else:
            index = (block_ids * self._block_step + self._head_offsets).view(-1)
            picked = self._picked[: len(index)]
            torch.index_select(self._rows, 0, index, out=picked)
        picked = picked.reshape(num_heads, len(block_ids) * block_size, head_dim)
        if picked.dtype == torch.float32:
            return picked
        floats = self._floats[: picked.numel()]
        if self._float8 is None:
            floats.copy_(picked.reshape(-1))
        else:
            index = picked.reshape(-1).view(torch.uint8).int()
            torch.index_select(self._float8, 0, index, out=floats)
        floats = floats.view(picked.shape)
        if self._scales is not None:
            scales = self._scales.transpose(0, 1)[:, block_ids]
            floats *= scales.reshape(num_heads, -1, 1)
        return floats
