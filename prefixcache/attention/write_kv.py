"""Write the K/V of new tokens into the slots that were allocated for them.

Threads: safe as long as no other call touches the same slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.checks import check_write
from prefixcache.attention.device import uses_triton
from prefixcache.storage.kv_cache import KVCache

TILE_ELEMENTS = 2048  # of K, and of V, that a program moves: two loads of 16 bytes a thread


@torch.no_grad()
def write_kv(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """Store token t's K/V at slot `slot_mapping[t]`; those with slot -1 are skipped.

    cache: written in place. k: `[T, Hkv, D]`, v: `[T, Hkv, Dv]`, of the cache's dtype;
    slot_mapping: `[T]` int64, no slot twice.

    Raises InvalidArgumentError, with nothing written, on a wrong shape, dtype or device or a slot
    out of range.
    """
    check_write(cache, k, v, slot_mapping)
    if uses_triton(cache.keys):
        _launch(cache, k, v, torch.from_numpy(slot_mapping).to(k.device))
    else:
        _write(cache, k, v, slot_mapping)


def _launch(cache: KVCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    from prefixcache.attention.kernels.write_kv import write_kv_kernel

    key_cache, value_cache = cache.keys, cache.values
    _, num_heads, block_size, head_dim = key_cache.shape
    num_rows = len(slot_mapping) * num_heads
    if num_rows == 0:
        return
    block_d = 1 << (head_dim - 1).bit_length()
    tile_rows = max(1, TILE_ELEMENTS // block_d)
    with torch.cuda.device_of(key_cache):
        write_kv_kernel[(-(-num_rows // tile_rows),)](
            key_cache,
            value_cache,
            k,
            v,
            slot_mapping,
            num_rows,
            key_cache.stride(),
            value_cache.stride(),
            k.stride(),
            v.stride(),
            NUM_HEADS=num_heads,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            TILE_ROWS=tile_rows,
        )


def _write(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: npt.NDArray[np.int64]
) -> None:
    skipped = slot_mapping < 0
    if skipped.any():
        tokens = torch.from_numpy(np.flatnonzero(~skipped)).to(k.device)
        k, v, slot_mapping = k[tokens], v[tokens], slot_mapping[~skipped]
    block_ids, offsets = np.divmod(slot_mapping, cache.keys.shape[2])
    block_ids_t = torch.from_numpy(block_ids).to(k.device)
    offsets_t = torch.from_numpy(offsets).to(k.device)
    cache.keys[block_ids_t, :, offsets_t] = k
    cache.values[block_ids_t, :, offsets_t] = v
