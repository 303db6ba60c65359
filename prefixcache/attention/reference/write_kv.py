"""Twin of `prefixcache.attention.write_kv`: one token after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.storage.kv_cache import LARGEST_STORED, SMALLEST_SCALE, KVCache


def write_kv(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """Arguments as in the twin; a cache without scales may have any dtype."""
    block_size = cache.keys.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block_id, offset = slot // block_size, slot % block_size
        for part, (name, new) in enumerate((("keys", k), ("values", v))):
            if new is None:
                continue
            stored = new[token]
            if cache.scales is not None:
                fixed = None if cache.scales.fixed is None else cache.scales.fixed[part]
                stored, scales = quantize(stored, getattr(cache, name).dtype, fixed)
                if fixed is None:
                    getattr(cache.scales, name)[block_id, :, offset] = scales
                else:  # one number a block: strides of 0
                    getattr(cache.scales, name)[block_id, 0, 0] = fixed
            getattr(cache, name)[block_id, :, offset] = stored


def quantize(
    heads: torch.Tensor, dtype: torch.dtype, fixed: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[Hkv, D]` of one token in float8_e4m3fn or int8, and a scale a head: `[Hkv] float32`.

    All arithmetic is float32, divisions are rounded to the nearest, ties to even as are the
    numbers stored; what is beyond the largest number saturates. A head with a NaN has the scale
    NaN, so that it reads as NaN.
    """
    largest = LARGEST_STORED[dtype]
    if fixed is None:
        scales = (heads.float().abs().amax(dim=1) / largest).clamp(min=SMALLEST_SCALE)
    else:
        scales = torch.full(heads.shape[:1], fixed)
    scaled = (heads.float() / scales[:, None]).clamp(-largest, largest)
    if dtype == torch.int8:
        scaled = scaled.nan_to_num().round()
    return scaled.to(dtype), scales
