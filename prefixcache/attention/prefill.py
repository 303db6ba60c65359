"""Attention for many new tokens of a sequence, on top of what is cached.

Where Triton runs it is `paged_attention`; the rest of this module is the torch path, for CPU.

Bound by arithmetic. Queries go in steps of QUERY_STEP tokens, each against the keys up to its own
last token, so that memory stays bounded and little is computed that the mask throws away. Inputs
are float32: bfloat16 products are many times slower on CPUs without instructions for them.

Measured against plain matrix products and softmax head by head (up to 10 % faster on an idle
machine, but up to 10x slower beside other busy processes, since every small product waits for all
threads), against one call with a whole mask (1.3x slower), and against a causal call joined to a
context call by log-sum-exp (equal, and needs private functions of torch).

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention
from prefixcache.attention.device import uses_triton
from prefixcache.attention.sequence_kv import BlockReader, used_block_ids
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

QUERY_STEP = 256
_KEY_ELEMENTS = 2**22  # of the K, and of the V, that are float32 at a time: 16 MiB each


@torch.no_grad()
def prefill(
    q: torch.Tensor, cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Causal attention over all tokens so far: the token at position p sees positions 0..p.

    q: `[T, Hq, D]` of the cache's dtype. cache: K/V of the new tokens in place. Returns
    `[T, Hq, Dv]` of q's dtype, new memory.

    Raises InvalidArgumentError on a wrong shape, dtype, device, scale, or a batch that does not
    fit.
    """
    if uses_triton(q):
        from prefixcache.attention.paged_attention import paged_attention

        return paged_attention(q, cache, batch, options)
    check_attention(q, cache, batch, options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = batch.query_start.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        if first == end:
            continue
        block_ids = used_block_ids(
            batch.block_tables[sequence], seq_len, cache.keys.shape[2], q.device
        )
        attend_many(q[first:end], cache, block_ids, seq_len, options, out[first:end])
    return out


def attend_many(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    seq_len: int,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """The last `len(q)` tokens of one sequence of `seq_len` tokens; shapes as in `prefill`."""
    num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
    # Query head h * G + g reads KV head h.
    queries = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    outputs = out.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    num_heads = min(num_kv_heads, max(1, _KEY_ELEMENTS // (seq_len * head_dim)))
    for head in range(0, num_kv_heads, num_heads):
        heads = slice(head, head + num_heads)
        keys = BlockReader(cache.keys[:, heads], len(block_ids)).read(block_ids)
        values = BlockReader(cache.values[:, heads], len(block_ids)).read(block_ids)
        # Cut V as well as K: a weight of 0 does not cancel a NaN in an unused slot.
        _attend_heads(
            queries[heads], keys[:, :seq_len], values[:, :seq_len], options, outputs[heads]
        )


def _attend_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """queries, out: `[H, G, T, D]`; keys, values: `[H, seq_len, D] float32`."""
    num_tokens, seq_len = queries.shape[2], keys.shape[1]
    for first in range(0, num_tokens, QUERY_STEP):
        end = min(first + QUERY_STEP, num_tokens)
        visible = seq_len - num_tokens + end
        mask = torch.ones(end - first, visible, dtype=torch.bool, device=queries.device)
        mask.tril_(visible - (end - first))
        # Expanded, not copied: the G query heads of a KV head read the same memory.
        shape = (keys.shape[0], queries.shape[1], visible, keys.shape[2])
        out[:, :, first:end] = F.scaled_dot_product_attention(
            queries[:, :, first:end].float(),
            keys[:, None, :visible].expand(shape),
            values[:, None, :visible].expand(shape),
            attn_mask=mask,
            scale=options.scale_for(keys.shape[2]),
        )
