"""Twin of `prefixcache.attention.write_kv`: one token after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.storage.kv_cache import KVCache


def write_kv(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """Arguments as in the twin; the cache may have any dtype."""
    block_size = cache.keys.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block_id, offset = slot // block_size, slot % block_size
        cache.keys[block_id, :, offset] = k[token]
        cache.values[block_id, :, offset] = v[token]
