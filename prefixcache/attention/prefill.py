"""Attention for many new tokens of a sequence, on top of what is cached.

Bound by arithmetic: one KV head at a time, whose K/V as float32 stay in the CPU's cache or near
it, and queries in steps of about MAX_ROWS rows, so that memory is bounded by MAX_ROWS times the
sequence's length. A step multiplies with the keys up to its own last token only, and the mask
touches nothing but the square of the step's own tokens.

Measured against scaled_dot_product_attention in the same steps, with float32 or bfloat16 inputs,
and against its causal mode joined to the context part by log-sum-exp: all are within 10 % of each
other, the products' own speed. This one needs no mask as long as the context, and shares its
arithmetic with decode.

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention
from prefixcache.attention.decode import attend_few
from prefixcache.attention.sequence_kv import gather_tokens, later_tokens, used_block_ids

MAX_ROWS = 256
"""Rows (query tokens times G) of one KV head that are computed together."""
FEW_ROWS = 32
"""Up to so many rows of a KV head, all heads at once are faster than one by one."""


@torch.no_grad()
def prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """Causal attention over all tokens so far: the token at position p sees positions 0..p.

    q: `[T, Hq, D]` of the cache's dtype. key_cache, value_cache: `[N, Hkv, B, D]`, any strides,
    K/V of the new tokens in place. Returns `[T, Hq, D]` of q's dtype, new memory.

    Raises InvalidArgumentError on a wrong shape, dtype, device, scale, or a batch that does not
    fit.
    """
    check_attention(q, key_cache, value_cache, batch, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // key_cache.shape[1]
    starts = batch.query_start.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        if first == end:
            continue
        block_ids = used_block_ids(
            batch.block_tables[sequence], seq_len, key_cache.shape[2], q.device
        )
        attend = attend_few if (end - first) * group <= FEW_ROWS else _attend_many
        out[first:end] = attend(q[first:end], key_cache, value_cache, block_ids, seq_len, scale)
    return out


def _attend_many(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_len: int,
    scale: float,
) -> torch.Tensor:
    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads = key_cache.shape[1]
    group = num_query_heads // num_kv_heads
    queries = q.view(num_tokens, num_kv_heads, group, head_dim)
    out = torch.empty(queries.shape, dtype=q.dtype, device=q.device)
    for head in range(num_kv_heads):
        keys = gather_tokens(key_cache[:, head : head + 1], block_ids)[0, :seq_len]
        values = gather_tokens(value_cache[:, head : head + 1], block_ids)[0, :seq_len]
        out[:, head] = _attend_head(queries[:, head], keys, values, scale)
    return out.view(q.shape)


def _attend_head(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """queries: `[T, G, D]`; keys, values: `[seq_len, D] float32` -> `[T, G, D] float32`."""
    num_tokens, group, head_dim = queries.shape
    context = len(keys) - num_tokens
    step = max(1, MAX_ROWS // group)
    hidden = later_tokens(min(step, num_tokens), queries.device)
    out = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    for first in range(0, num_tokens, step):
        end = min(first + step, num_tokens)
        size, visible = end - first, context + end
        rows = (queries[first:end].float() * scale).reshape(size * group, head_dim)
        scores = rows @ keys[:visible].T
        own = scores.view(size, group, visible)[..., context + first :]
        own.masked_fill_(hidden[:size, :, :size], -torch.inf)
        weights = torch.softmax(scores, dim=1)
        out[first:end] = (weights @ values[:visible]).view(size, group, head_dim)
    return out
