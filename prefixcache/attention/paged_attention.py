"""Launcher of the Triton kernels behind `prefill` and `decode`, which compute the same thing.

Checks, chooses (see `selection`), uploads the batch in one copy and launches: the kernel of
`paged_attention`, or over latent K/V that of `mla`, and `combine` behind it if there are splits;
where reading shared blocks once pays, those of `tree_attention`.
Between the upload and the result nothing waits for the device, and no size of a launch depends on a
length, so `launch` can be captured in a CUDA graph.

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

import numpy as np
import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention, output_of
from prefixcache.attention.device_batch import DeviceBatch, upload
from prefixcache.attention.mla import launch_mla
from prefixcache.attention.selection import (
    Plan,
    Shapes,
    architecture_of,
    as_loaded,
    choose_plan,
    choose_shared_prefix,
    num_cores,
    padded_head_dim,
)
from prefixcache.attention.tree_attention import tree_attention
from prefixcache.attention.weighing import Weighing, weigh
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

_COMBINE_ELEMENTS = 8192  # float32 of the parts of one row that 4 warps hold in registers


@torch.no_grad()
def paged_attention(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over all tokens so far, the new ones included.

    q: `[T, Hq, D]` of the cache's dtype, and of any if that is quantised; any strides. cache: K/V
    of the new tokens in place. out: as in `decode`. Returns `[T, Hq, Dv]` of q's dtype.

    Raises InvalidArgumentError on a wrong shape, dtype, device, scale, or a batch that does not
    fit.
    """
    check_attention(q, cache, batch, options)
    out = output_of(q, cache, out)
    if len(q) == 0:
        return out
    longest_query = int(np.diff(batch.query_start).max())
    shapes = Shapes(
        num_tokens=len(q),
        num_sequences=len(batch.seq_lens),
        longest_query=longest_query,
        max_seq_len=_most_keys_seen(batch, cache, longest_query, options.window),
        num_query_heads=q.shape[1],
        num_kv_heads=cache.keys.shape[1],
        head_dim=out.shape[2],
        dtype=q.dtype,
        stored=cache.keys.dtype,
        is_latent=cache.is_latent,
    )
    # Over latents the arithmetic is the bound, not the reading.
    prefix = None if cache.is_latent else choose_shared_prefix(cache, batch, options)
    if prefix is not None:
        tree_attention(q, cache, batch, options, prefix, shapes, out)
        return out
    plan = choose_plan(shapes, architecture_of(q.device), num_cores(q.device))
    launch(q, cache, upload(batch, q.device), options, plan, out)
    return out


def launch(
    q: torch.Tensor,
    cache: KVCache,
    batch: DeviceBatch,
    options: AttentionOptions,
    plan: Plan,
    out: torch.Tensor,
) -> None:
    """`paged_attention` of checked arguments into `out`, which is contiguous; T > 0.

    Any plan is right for any batch. `batch` may have been refilled on the device since the plan
    was chosen, also with a longer table.
    """
    weighing = weigh(options, q.shape[2], q.device)
    parts, log_sums = out, None
    if plan.num_splits > 1:
        shape = (*out.shape[:2], plan.num_splits)
        parts = q.new_empty(*shape, out.shape[2], dtype=torch.float32)
        log_sums = q.new_empty(shape, dtype=torch.float32)
    launch_kernel = launch_mla if cache.is_latent else _launch_paged_attention
    with torch.cuda.device_of(q):
        launch_kernel(q, cache, batch, weighing, plan, parts, log_sums)
        if log_sums is not None:
            _launch_combine(parts, log_sums, weighing, out)


def _launch_paged_attention(
    q: torch.Tensor,
    cache: KVCache,
    batch: DeviceBatch,
    weighing: Weighing,
    plan: Plan,
    parts: torch.Tensor,
    log_sums: torch.Tensor | None,
) -> None:
    """parts: `[T, Hq, D]`, or with splits, as in log_sums, `[T, Hq, splits, D]`."""
    from prefixcache.attention.kernels.paged_attention import paged_attention_kernel

    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = num_query_heads // num_kv_heads
    tiles, num_splits, scales = plan.tiles, plan.num_splits, cache.scales
    num_sequences, table_stride = batch.block_tables.shape
    grid = (
        num_tokens // (tiles.rows // plan.group_part) + num_sequences,
        num_kv_heads * -(-group // plan.group_part),
        num_splits,
    )
    paged_attention_kernel[grid](
        q,
        as_loaded(cache.keys),
        as_loaded(cache.values),
        scales and scales.keys,
        scales and scales.values,
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
        cache.values.stride(),
        scales and scales.keys.stride(),
        scales and scales.values.stride(),
        NUM_QUERY_HEADS=num_query_heads,
        GROUP=group,
        GROUP_PART=plan.group_part,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=padded_head_dim(head_dim),
        NUM_SPLITS=num_splits,
        MIN_SPLIT=plan.min_split,
        SIGN=weighing.sign,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _launch_combine(
    parts: torch.Tensor, log_sums: torch.Tensor, weighing: Weighing, out: torch.Tensor
) -> None:
    from prefixcache.attention.kernels.combine import combine_kernel

    num_tokens, num_query_heads, num_splits, value_dim = parts.shape
    block_d = padded_head_dim(value_dim)
    combine_kernel[(num_tokens * num_query_heads,)](
        parts,
        log_sums,
        out,
        HEAD_DIM=value_dim,
        BLOCK_D=block_d,
        NUM_PARTS=num_splits,
        sinks=weighing.sinks,
        NUM_HEADS=num_query_heads,
        num_warps=8 if num_splits * block_d > _COMBINE_ELEMENTS else 4,
    )


def _most_keys_seen(
    batch: AttentionBatch, cache: KVCache, longest_query: int, window: int | None
) -> int:
    """Keys that the queries of one sequence may see together."""
    num_keys = batch.block_tables.shape[1] * cache.keys.shape[2]
    return num_keys if window is None else min(num_keys, window + longest_query)
