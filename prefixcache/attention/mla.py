"""Launcher of the kernel for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

What a model with latents has in the cache is, for each token, one latent `c` of R elements and one
rope key of P elements, for all heads. Its up-projections stay with the caller, who absorbs them
(section 2.1.2 there): `q = [q_nope W_UK, q_rope]` of R + P elements a head goes in, attention runs
over the latents as they are, and `out W_UV` of R elements a head comes out. It equals attention
over the decompressed `K = [W_UK c, rope key]` and `V = W_UV c`: see `reference.mla`.

Decode reads (R + P) elements a token, once for all heads: 1,152 bytes with R + P = 512 + 64 of 16
bits, the floor that its time is to be held against. Heads in several parts, see `selection`, read
them again, from the L2 cache. Prompts run here too. They cost 2 (2 R + P) operations for a token,
head and token seen, against 2 (D + P + D) decompressed, 3.4 times as many in DeepSeek-V2; so a
long prompt without a cached prefix is faster if the engine attends to it decompressed itself.

`paged_attention` is the way in; it checks, plans and joins splits.
"""

from __future__ import annotations

import torch

from prefixcache.attention.device_batch import DeviceBatch
from prefixcache.attention.selection import Plan, padded_head_dim
from prefixcache.attention.weighing import Weighing
from prefixcache.storage.kv_cache import KVCache


def launch_mla(
    q: torch.Tensor,
    cache: KVCache,
    batch: DeviceBatch,
    weighing: Weighing,
    plan: Plan,
    parts: torch.Tensor,
    log_sums: torch.Tensor | None,
) -> None:
    """Checked arguments, any strides, T > 0, every option.

    q: `[T, Hq, R + P]`; cache: latent, `[N, 1, B, R + P]`. parts: `[T, Hq, R]`, or with splits `[T,
    Hq, splits, R]` float32 and log_sums: `[T, Hq, splits]`, both for `combine`; contiguous.
    """
    from prefixcache.attention.kernels.mla import mla_kernel

    num_tokens, num_heads, width = q.shape
    latent_dim, block_size = cache.values.shape[3], cache.keys.shape[2]
    tiles, num_splits = plan.tiles, plan.num_splits
    num_sequences, table_stride = batch.block_tables.shape
    num_query_parts = num_tokens // (tiles.rows // plan.group_part) + num_sequences
    # Query parts and heads are on one axis, as the other axes end at 65535.
    grid = (num_query_parts * -(-num_heads // plan.group_part), num_splits)
    mla_kernel[grid](
        q,
        cache.keys,
        parts,
        log_sums,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        weighing.scale,
        weighing.cap_scale,
        weighing.alibi_slopes,
        weighing.sinks if num_splits == 1 else None,
        weighing.window,
        num_sequences,
        table_stride,
        q.stride(),
        cache.keys.stride(),
        NUM_HEADS=num_heads,
        HEADS_PART=plan.group_part,
        LATENT_DIM=latent_dim,
        ROPE_DIM=width - latent_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_R=padded_head_dim(latent_dim),
        BLOCK_P=padded_head_dim(width - latent_dim),
        NUM_SPLITS=num_splits,
        MIN_SPLIT=plan.min_split,
        SIGN=weighing.sign,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
