"""Twin of `prefill` and of `decode`, which compute the same thing: one row after another."""

from __future__ import annotations

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions


def attention(
    q: torch.Tensor, cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Arguments as in the twins, of any dtype; returns `[T, Hq, D] float64`."""
    _, num_kv_heads, block_size, head_dim = cache.keys.shape
    scale = options.scale_for(head_dim)
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    for sequence, context in enumerate(batch.context_lens.tolist()):
        first, end = batch.query_start[sequence : sequence + 2].tolist()
        table = batch.block_tables[sequence].tolist()
        for token in range(first, end):
            num_visible = context + token - first + 1
            slots = [(table[p // block_size], p % block_size) for p in range(num_visible)]
            keys = torch.stack([cache.keys[block, :, offset] for block, offset in slots])
            values = torch.stack([cache.values[block, :, offset] for block, offset in slots])
            for head in range(q.shape[1]):
                scores = keys[:, head // group].double() @ q[token, head].double() * scale
                weights = torch.softmax(scores, dim=0)
                out[token, head] = weights @ values[:, head // group].double()
    return out
