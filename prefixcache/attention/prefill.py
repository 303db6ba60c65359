"""Attention for many new tokens of a sequence, on top of what is cached.

Where Triton runs it is `paged_attention`, on CPUs that it is compiled for `native_attention`; the
rest of this module is the torch path.

Bound by arithmetic. Queries go in steps of QUERY_STEP tokens, each against the keys that its own
tokens see, so that memory stays bounded and little is computed that the mask throws away. Inputs
are float32: bfloat16 products are many times slower on CPUs without instructions for them. What
torch's scaled_dot_product_attention does not offer (a soft cap, sinks), or only in memory that
grows with the context (ALiBi, latents), is streamed as in `decode`: 1.15x slower where both work.
Short chunks of sequences that share blocks are computed together: 1.3 to 1.9 times faster for 16 to
8 new tokens of each of 8 sequences that share 2,048.

Measured against plain matrix products and softmax head by head (up to 10 % faster on an idle
machine, but up to 10x slower beside other busy processes, since every small product waits for all
threads), against one call with a whole mask (1.3x slower), and against a causal call joined to a
context call by log-sum-exp (equal, and needs private functions of torch).

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention, output_of
from prefixcache.attention.device import uses_native, uses_triton
from prefixcache.attention.selection import choose_shared_prefix
from prefixcache.attention.sequence_kv import KVReader, KVTile, select_heads
from prefixcache.attention.shared_streaming import attend_shared
from prefixcache.attention.streaming import attend_streaming, first_seen, tile_blocks
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

QUERY_STEP = 256
_KEY_ELEMENTS = 2**22  # of the K, and of the V, that are float32 at a time: 16 MiB each


@torch.no_grad()
def prefill(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over all tokens so far: the token at position p sees positions 0..p.

    q: `[T, Hq, D]` of the cache's dtype, or of any if that is quantised. cache: K/V of the new
    tokens in place. out: where the result goes, contiguous, of its
    shape and q's dtype; new memory if left out. Returns `[T, Hq, Dv]`.

    Raises InvalidArgumentError on a wrong shape, dtype, device or option, or a batch that does
    not fit.
    """
    if uses_triton(q):
        from prefixcache.attention.paged_attention import paged_attention

        return paged_attention(q, cache, batch, options, out)
    check_attention(q, cache, batch, options)
    if uses_native(cache, q):
        from prefixcache.attention.native_attention import native_attention

        return native_attention(q, cache, batch, options, in_background=True, out=out)
    return prefill_in_torch(q, cache, batch, options, out)


def prefill_in_torch(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`prefill` of checked arguments without compiled code."""
    out = output_of(q, cache, out)
    plan = choose_shared_prefix(cache, batch, options)
    if plan is not None:
        max_blocks = min(tile_blocks(cache, q.shape[1]), batch.block_tables.shape[1])
        attend_shared(q, KVReader(cache, max_blocks), batch, plan, options, out)
    starts = batch.query_start.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        new = slice(starts[sequence], starts[sequence + 1])
        if plan is not None and plan.private_starts[sequence] > 0:
            continue
        if new.stop > new.start:
            attend_many(q[new], cache, batch.block_tables[sequence], seq_len, options, out[new])
    return out


def attend_many(
    q: torch.Tensor,
    cache: KVCache,
    block_table: npt.NDArray[np.int32],
    seq_len: int,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """The last `len(q)` tokens of one sequence of `seq_len` tokens; shapes as in `prefill`."""
    seen = first_seen(seq_len - len(q), options.window)
    num_blocks = -(-seq_len // cache.keys.shape[2]) - seen // cache.keys.shape[2]
    if options.soft_cap is not None or options.alibi_slopes or options.sinks or cache.is_latent:
        reader = KVReader(cache, min(tile_blocks(cache, q.shape[1]), num_blocks))
        attend_streaming(q, reader, block_table, seq_len, options, out)
        return
    num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
    # Query head h * G + g reads KV head h.
    queries = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    outputs = out.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    num_heads = min(num_kv_heads, max(1, _KEY_ELEMENTS // ((seq_len - seen) * head_dim)))
    for head in range(0, num_kv_heads, num_heads):
        heads = slice(head, head + num_heads)
        reader = KVReader(select_heads(cache, heads), num_blocks)
        (tile,) = reader.tiles(block_table, seen, seq_len)
        _attend_heads(queries[heads], tile, options, outputs[heads])


def _attend_heads(
    queries: torch.Tensor,
    tile: KVTile,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """queries, out: `[H, G, T, D]`; tile: all tokens that they see."""
    num_heads, group, num_tokens, head_dim = queries.shape
    context = tile.first + tile.keys.shape[1] - num_tokens
    for first in range(0, num_tokens, QUERY_STEP):
        end = min(first + QUERY_STEP, num_tokens)
        seen = first_seen(context + first, options.window)
        visible = slice(seen - tile.first, context + end - tile.first)
        positions = torch.arange(context + first, context + end, device=queries.device)
        distances = torch.arange(seen, context + end, device=queries.device) - positions[:, None]
        mask = distances <= 0
        if options.window is not None:
            mask &= distances > -options.window
        # Expanded, not copied: the G query heads of a KV head read the same memory.
        shape = (num_heads, group, distances.shape[1], head_dim)
        out[:, :, first:end] = F.scaled_dot_product_attention(
            queries[:, :, first:end].float(),
            tile.keys[:, None, visible].expand(shape),
            tile.values[:, None, visible].expand(shape),
            attn_mask=mask,
            scale=options.scale_for(head_dim),
        )
