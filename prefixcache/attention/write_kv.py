"""Write the K/V of new tokens into the slots that were allocated for them.

Threads: safe as long as no other call touches the same slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.checks import check_write


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
    skipped = slot_mapping < 0
    if skipped.any():
        tokens = torch.from_numpy(np.flatnonzero(~skipped)).to(k.device)
        k, v, slot_mapping = k[tokens], v[tokens], slot_mapping[~skipped]
    block_ids, offsets = np.divmod(slot_mapping, key_cache.shape[2])
    block_ids_t = torch.from_numpy(block_ids).to(k.device)
    offsets_t = torch.from_numpy(offsets).to(k.device)
    key_cache[block_ids_t, :, offsets_t] = k
    value_cache[block_ids_t, :, offsets_t] = v
