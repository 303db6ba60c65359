"""Write the K/V of new tokens into the slots that were allocated for them.

Threads: safe as long as no other call touches the same slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.checks import check_write
from prefixcache.attention.device import uses_triton

TILE_ELEMENTS = 2048  # of K, and of V, that a program moves: two loads of 16 bytes a thread


@torch.no_grad()
def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: npt.NDArray[np.int64],
) -> None:
    """Store token t's K/V at slot `slot_mapping[t]`; those with slot -1 are skipped.

    key_cache, value_cache: `[N, Hkv, B, D]`, any strides; written in place.
    k, v: `[T, Hkv, D]` of the cache's dtype; slot_mapping: `[T]` int64, no slot twice.

    Raises InvalidArgumentError, with nothing written, on a wrong shape, dtype or device or a slot
    out of range.
    """
    check_write(key_cache, value_cache, k, v, slot_mapping)
    if uses_triton(key_cache):
        _launch(key_cache, value_cache, k, v, torch.from_numpy(slot_mapping).to(k.device))
    else:
        _write(key_cache, value_cache, k, v, slot_mapping)


def _launch(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    from prefixcache.attention.kernels.write_kv import write_kv_kernel

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
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: npt.NDArray[np.int64],
) -> None:
    skipped = slot_mapping < 0
    if skipped.any():
        tokens = torch.from_numpy(np.flatnonzero(~skipped)).to(k.device)
        k, v, slot_mapping = k[tokens], v[tokens], slot_mapping[~skipped]
    block_ids, offsets = np.divmod(slot_mapping, key_cache.shape[2])
    block_ids_t = torch.from_numpy(block_ids).to(k.device)
    offsets_t = torch.from_numpy(offsets).to(k.device)
    key_cache[block_ids_t, :, offsets_t] = k
    value_cache[block_ids_t, :, offsets_t] = v
