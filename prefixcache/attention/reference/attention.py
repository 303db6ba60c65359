"""Twin of `prefill` and of `decode`, which compute the same thing: one row after another."""

from __future__ import annotations

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions


def attention(
    q: torch.Tensor, cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Arguments as in the twins, of any dtype; returns `[T, Hq, Dv] float64`."""
    num_kv_heads, block_size = cache.keys.shape[1:3]
    num_query_heads = q.shape[1]
    group = num_query_heads // num_kv_heads
    out = torch.empty(*q.shape[:2], cache.values.shape[3], dtype=torch.float64)
    for sequence, context in enumerate(batch.context_lens.tolist()):
        first, end = batch.query_start[sequence : sequence + 2].tolist()
        table = batch.block_tables[sequence].tolist()
        for token in range(first, end):
            position = context + token - first
            first_seen = 0 if options.window is None else max(0, position - options.window + 1)
            seen = range(first_seen, position + 1)
            slots = [(table[p // block_size], p % block_size) for p in seen]
            keys = torch.stack([_read(cache, "keys", *slot) for slot in slots])
            values = torch.stack([_read(cache, "values", *slot) for slot in slots])
            distances = torch.tensor(seen, dtype=torch.float64) - position
            for head in range(num_query_heads):
                kv_head = head // group
                scores = _scores(q[token, head], keys[:, kv_head], distances, head, options)
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                out[token, head] = weights @ values[:, kv_head]
    return out


def _read(cache: KVCache, name: str, block: int, offset: int) -> torch.Tensor:
    """K or V of one slot as stored, or times its scale: `[Hkv, D] float64`."""
    stored: torch.Tensor = getattr(cache, name)[block, :, offset].double()
    if cache.scales is not None:
        stored = stored * getattr(cache.scales, name)[block, :, offset, None].double()
    return stored


def _scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    distances: torch.Tensor,
    head: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Of the keys `[n, D]` that one head of one token sees; a sink's score stands last."""
    scores = keys @ q.double() * options.scale_for(len(q))
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    if options.alibi_slopes:
        scores = scores + options.alibi_slopes[head] * distances
    if options.sinks:
        scores = torch.cat([scores, scores.new_tensor([options.sinks[head]])])
    return scores
