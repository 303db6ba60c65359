"""Write the K/V of new tokens into the slots that were allocated for them.

Where Triton runs it is a kernel; on CPUs that attention is compiled for, compiled code, but for a
cache with scales. Its threads are those of attention: torch's spin for milliseconds after each
operation, and attention, which comes next, then had one core of two (819 tokens: 4.5 ms with it,
1.8 ms without).

Threads: safe as long as no other call touches the same slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.checks import check_write
from prefixcache.attention.device import uses_native, uses_triton
from prefixcache.attention.selection import as_loaded
from prefixcache.storage.kv_cache import LARGEST_STORED, SMALLEST_SCALE, KVCache

TILE_ELEMENTS = 2048  # of K, and of V, that a program moves: two loads of 16 bytes a thread


@torch.no_grad()
def write_kv(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """Store token t's K/V at slot `slot_mapping[t]`; those with slot -1 are skipped.

    cache: written in place, scales included. k: `[T, Hkv, D]`, v: `[T, Hkv, Dv]`, of the cache's
    dtype, and of any if that is quantised; v is None for latent K/V. slot_mapping: `[T]` int64, no
    slot twice.

    Raises InvalidArgumentError, with nothing written, on a wrong shape, dtype or device or a slot
    out of range.
    """
    check_write(cache, k, v, slot_mapping)
    if uses_triton(cache.keys):
        _launch(cache, k, v, torch.from_numpy(slot_mapping).to(k.device))
    elif cache.scales is None and uses_native(cache, k, k if v is None else v):
        if len(slot_mapping) > 0:
            from prefixcache.attention.native.attention import write

            write(torch.get_num_threads(), k, v, cache, np.ascontiguousarray(slot_mapping))
    else:
        _write(cache, k, v, slot_mapping)


def _launch(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: torch.Tensor
) -> None:
    from prefixcache.attention.kernels.write_kv import write_kv_kernel

    _, num_heads, block_size, head_dim = cache.keys.shape
    num_rows = len(slot_mapping) * num_heads
    if num_rows == 0:
        return
    scales = cache.scales
    fixed_key_scale, fixed_value_scale = (scales and scales.fixed) or (None, None)
    block_d = 1 << (head_dim - 1).bit_length()
    tile_rows = max(1, TILE_ELEMENTS // block_d)
    with torch.cuda.device_of(cache.keys):
        write_kv_kernel[(-(-num_rows // tile_rows),)](
            as_loaded(cache.keys),
            as_loaded(cache.values),
            scales and scales.keys,
            scales and scales.values,
            k,
            v,
            slot_mapping,
            fixed_key_scale,
            fixed_value_scale,
            num_rows,
            cache.keys.stride(),
            cache.values.stride(),
            scales and scales.keys.stride(),
            scales and scales.values.stride(),
            k.stride(),
            None if v is None else v.stride(),
            NUM_HEADS=num_heads,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            TILE_ROWS=tile_rows,
        )


def _write(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: npt.NDArray[np.int64]
) -> None:
    written = slot_mapping >= 0
    tokens = None
    if not written.all():
        tokens = torch.from_numpy(np.flatnonzero(written)).to(k.device)
        slot_mapping = slot_mapping[written]
    block_ids, offsets = (
        torch.from_numpy(column).to(k.device)
        for column in np.divmod(slot_mapping, cache.keys.shape[2])
    )
    for name, new in (("keys", k), ("values", v)):
        if new is None:
            continue
        stored = new if tokens is None else new[tokens]
        view: torch.Tensor = getattr(cache, name)
        if cache.scales is not None:
            scale_view: torch.Tensor = getattr(cache.scales, name)
            if cache.scales.fixed is None:
                stored, scales = _quantize(stored, view.dtype, None)
                scale_view[block_ids, :, offsets] = scales
            else:
                fixed = cache.scales.fixed[name == "values"]
                stored, _ = _quantize(stored, view.dtype, fixed)
                # One scale a block: the view's other dimensions have the stride 0.
                scale_view[:, 0, 0][block_ids] = fixed
        view[block_ids, :, offsets] = stored


def _quantize(
    heads: torch.Tensor, dtype: torch.dtype, fixed: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, Hkv, D]` in float8 or int8, and the scales: `[T, Hkv] float32`."""
    largest = LARGEST_STORED[dtype]
    floats = heads.float()
    if fixed is None:
        scales = (floats.abs().amax(dim=2) / largest).clamp_(min=SMALLEST_SCALE)
    else:
        scales = floats.new_full(heads.shape[:2], fixed)
    scaled = (floats / scales[:, :, None]).clamp_(-largest, largest)
    if dtype == torch.int8:
        scaled = scaled.nan_to_num_().round_()
    return scaled.to(dtype), scales
