"""Attention for a few new tokens of each of many sequences.

Bound by reading K/V: each sequence's context is streamed through the CPU's cache in tiles of some
hundred tokens, for all KV heads at once. The query heads that share a KV head are rows of one
matrix product, so K/V are read once per group. Scores, softmax and sums are float32: bfloat16
products are many times slower on CPUs without instructions for them, and less exact.

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention
from prefixcache.attention.sequence_kv import gather_tokens, later_tokens, used_block_ids

_TILE_ELEMENTS = 2**19  # a K or V tile in float32: 2 MiB
MAX_ROWS = 64
"""Rows (query tokens times G) of one KV head that are computed together."""


@torch.no_grad()
def decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """Causal attention over all tokens so far, the new ones included.

    q: `[T, Hq, D]` of the cache's dtype. key_cache, value_cache: `[N, Hkv, B, D]`, any strides,
    K/V of the new tokens in place. Returns `[T, Hq, D]` of q's dtype, new memory. Any number of
    tokens is right; for long runs of them `prefill` is faster.

    Raises InvalidArgumentError on a wrong shape, dtype, device, scale, or a batch that does not
    fit.
    """
    check_attention(q, key_cache, value_cache, batch, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = batch.query_start.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        if first == end:
            continue
        block_ids = used_block_ids(
            batch.block_tables[sequence], seq_len, key_cache.shape[2], q.device
        )
        out[first:end] = attend_few(q[first:end], key_cache, value_cache, block_ids, seq_len, scale)
    return out


def attend_few(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_len: int,
    scale: float,
) -> torch.Tensor:
    """The last `len(q)` tokens of one sequence of `seq_len` tokens; shapes as in `decode`.

    Reads the context once for every MAX_ROWS rows.
    """
    num_tokens, num_query_heads, _ = q.shape
    step = max(1, MAX_ROWS * key_cache.shape[1] // num_query_heads)
    if num_tokens <= step:
        return _attend_rows(q, key_cache, value_cache, block_ids, seq_len, scale)
    parts = []
    for first in range(0, num_tokens, step):
        part = q[first : first + step]
        visible = seq_len - num_tokens + first + len(part)
        parts.append(_attend_rows(part, key_cache, value_cache, block_ids, visible, scale))
    return torch.cat(parts)


def _attend_rows(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_len: int,
    scale: float,
) -> torch.Tensor:
    num_tokens, num_query_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_query_heads // num_kv_heads
    # Row t * G + g of KV head h is query head h * G + g of token t.
    rows = q.view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    rows = (rows.float() * scale).reshape(num_kv_heads, num_tokens * group, head_dim)

    tile_blocks = max(1, _TILE_ELEMENTS // (num_kv_heads * block_size * head_dim))
    tile_tokens = tile_blocks * block_size
    tiles = block_ids[: -(-seq_len // block_size)].split(tile_blocks)
    scores = rows.new_empty(num_kv_heads, num_tokens * group, seq_len)
    for tile, part in zip(tiles, scores.split(tile_tokens, dim=2), strict=True):
        keys = gather_tokens(key_cache, tile)[:, : part.shape[2]]
        part.copy_(torch.bmm(rows, keys.transpose(1, 2)))
    if num_tokens > 1:
        new = scores.view(num_kv_heads, num_tokens, group, seq_len)[..., seq_len - num_tokens :]
        new.masked_fill_(later_tokens(num_tokens, q.device), -torch.inf)
    weights = torch.softmax(scores, dim=2)

    out = torch.zeros_like(rows)
    for tile, part in zip(tiles, weights.split(tile_tokens, dim=2), strict=True):
        # Cut like the scores: a weight of 0 does not cancel a NaN in an unused slot.
        values = gather_tokens(value_cache, tile)[:, : part.shape[2]]
        out.baddbmm_(part, values)
    out = out.view(num_kv_heads, num_tokens, group, head_dim).transpose(0, 1)
    return out.reshape(q.shape).to(q.dtype)
