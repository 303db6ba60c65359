"""Twin of `prefixcache.attention.write_kv`: one token after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: npt.NDArray[np.int64],
) -> None:
    """Arguments as in the twin; the caches may have any dtype."""
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block_id, offset = slot // block_size, slot % block_size
        key_cache[block_id, :, offset] = k[token]
        value_cache[block_id, :, offset] = v[token]
