"""Attention for a few new tokens of each of many sequences.

Where Triton runs it is `paged_attention`, on CPUs that it is compiled for `native_attention`; the
rest of this module is the torch path.

Bound by reading K/V: each sequence's context is streamed through the CPU's cache in tiles, for
all KV heads at once. Rejected: the way of `prefill`, which copies a whole context before it
computes (1.4x slower here).

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention, output_of
from prefixcache.attention.device import uses_native, uses_triton
from prefixcache.attention.prefill import attend_many
from prefixcache.attention.selection import choose_shared_prefix
from prefixcache.attention.sequence_kv import KVReader
from prefixcache.attention.shared_streaming import attend_shared
from prefixcache.attention.streaming import attend_streaming, tile_blocks
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

FEW_TOKENS = 16
"""New tokens of a sequence up to which streaming is the faster way."""


@torch.no_grad()
def decode(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over all tokens so far, the new ones included.

    q: `[T, Hq, D]` of the cache's dtype, or of any if that is quantised. cache: K/V of the new
    tokens in place. out: where the result goes, contiguous, of its
    shape and q's dtype; new memory if left out. Returns `[T, Hq, Dv]`. Any number of tokens is
    right.

    Raises InvalidArgumentError on a wrong shape, dtype, device or option, or a batch that does
    not fit.
    """
    if uses_triton(q):
        from prefixcache.attention.paged_attention import paged_attention

        return paged_attention(q, cache, batch, options, out)
    check_attention(q, cache, batch, options)
    if uses_native(cache, q):
        from prefixcache.attention.native_attention import native_attention

        return native_attention(q, cache, batch, options, out=out)
    return decode_in_torch(q, cache, batch, options, out)


def decode_in_torch(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode` of checked arguments without compiled code."""
    out = output_of(q, cache, out)
    max_blocks = min(tile_blocks(cache, q.shape[1]), batch.block_tables.shape[1])
    reader = KVReader(cache, max_blocks)
    plan = choose_shared_prefix(cache, batch, options)
    if plan is not None:
        attend_shared(q, reader, batch, plan, options, out)
    starts = batch.query_start.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        new = slice(starts[sequence], starts[sequence + 1])
        table = batch.block_tables[sequence]
        if plan is not None and plan.private_starts[sequence] > 0:
            continue
        if new.stop - new.start > FEW_TOKENS:
            attend_many(q[new], cache, table, seq_len, options, out[new])
        elif new.stop > new.start:
            attend_streaming(q[new], reader, table, seq_len, options, out[new])
    return out
