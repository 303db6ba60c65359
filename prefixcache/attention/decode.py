"""Attention for a few new tokens of each of many sequences.

Where Triton runs it is `paged_attention`; the rest of this module is the torch path, for CPU.

Bound by reading K/V: each sequence's context is streamed through the CPU's cache in tiles, for
all KV heads at once. The query heads that share a KV head are rows of one matrix product, so that
K/V are read once per group. Scores, softmax and sums are float32: bfloat16 products are many times
slower on CPUs without instructions for them, and less exact. Rejected: the way of `prefill`, which
copies a whole context before it computes (1.4x slower here).

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention
from prefixcache.attention.device import uses_triton
from prefixcache.attention.prefill import attend_many
from prefixcache.attention.sequence_kv import BlockReader, used_block_ids
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

FEW_TOKENS = 16
"""New tokens of a sequence up to which streaming is the faster way."""
MAX_SCORES = 2**26
"""Scores of a sequence, heads x new tokens x context, that are held at a time: 256 MiB."""
_TILE_ELEMENTS = 2**20  # of a K or V tile; 4 MiB in float32


@torch.no_grad()
def decode(
    q: torch.Tensor, cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Causal attention over all tokens so far, the new ones included.

    q: `[T, Hq, D]` of the cache's dtype. cache: K/V of the new tokens in place. Returns
    `[T, Hq, Dv]` of q's dtype, new memory. Any number of
    tokens is right.

    Raises InvalidArgumentError on a wrong shape, dtype, device, scale, or a batch that does not
    fit.
    """
    if uses_triton(q):
        from prefixcache.attention.paged_attention import paged_attention

        return paged_attention(q, cache, batch, options)
    check_attention(q, cache, batch, options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads, block_size, head_dim = cache.keys.shape[1:]
    tile_blocks = max(1, _TILE_ELEMENTS // (num_kv_heads * block_size * head_dim))
    tile_blocks = min(tile_blocks, batch.block_tables.shape[1])
    key_reader = BlockReader(cache.keys, tile_blocks)
    value_reader = BlockReader(cache.values, tile_blocks)
    starts = batch.query_start.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        if first == end:
            continue
        block_ids = used_block_ids(batch.block_tables[sequence], seq_len, block_size, q.device)
        queries = q[first:end]
        if end - first > FEW_TOKENS or queries.shape[1] * (end - first) * seq_len > MAX_SCORES:
            attend_many(queries, cache, block_ids, seq_len, options, out[first:end])
        else:
            tiles = block_ids.split(tile_blocks)
            out[first:end] = _attend_few(queries, key_reader, value_reader, tiles, seq_len, options)
    return out


def _attend_few(
    q: torch.Tensor,
    key_reader: BlockReader,
    value_reader: BlockReader,
    tiles: tuple[torch.Tensor, ...],
    seq_len: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """The last `len(q)` tokens of one sequence of `seq_len` tokens; q, result: `[T, Hq, D]`."""
    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads = key_reader.num_heads
    group = num_query_heads // num_kv_heads
    # Row t * G + g of KV head h is query head h * G + g of token t.
    rows = q.view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    rows = (rows.float() * options.scale_for(head_dim)).reshape(
        num_kv_heads, num_tokens * group, head_dim
    )

    scores = rows.new_empty(num_kv_heads, num_tokens * group, seq_len)
    done = 0
    for tile in tiles:
        keys = key_reader.read(tile)[:, : seq_len - done]
        part = scores[:, :, done : done + keys.shape[1]]
        part.copy_(torch.bmm(rows, keys.transpose(1, 2)))
        done += keys.shape[1]
    if num_tokens > 1:
        new = scores.view(num_kv_heads, num_tokens, group, seq_len)[..., seq_len - num_tokens :]
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu_(1)
        new.masked_fill_(later[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=2)

    out = torch.zeros_like(rows)
    done = 0
    for tile in tiles:
        # Cut V as well as K: a weight of 0 does not cancel a NaN in an unused slot.
        values = value_reader.read(tile)[:, : seq_len - done]
        out.baddbmm_(weights[:, :, done : done + values.shape[1]], values)
        done += values.shape[1]
    out = out.view(num_kv_heads, num_tokens, group, head_dim).transpose(0, 1)
    return out.reshape(q.shape).to(q.dtype)
