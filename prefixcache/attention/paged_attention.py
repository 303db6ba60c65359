"""Launcher of the Triton kernels behind `prefill` and `decode`, which compute the same thing.

Checks, chooses (see `selection`), uploads the batch in one copy and launches. Between the upload
and the result nothing waits for the device, and no size of a launch depends on a length, so
`launch` can be captured in a CUDA graph.

Threads: pure but for reading the cache; nobody may write
those blocks meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_attention
from prefixcache.attention.selection import (
    Plan,
    Shapes,
    architecture_of,
    as_loaded,
    choose_plan,
    num_cores,
    padded_head_dim,
)
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

_SMALLEST_FACTOR = 2.0**-126  # a normal float32; below it all weights are equal
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_LARGEST_CAP = 2.0**60  # a higher one changes no score within float32's precision
_LARGEST_WINDOW = 2**31 - 1
_LOG2_E = math.log2(math.e)
_COMBINE_ELEMENTS = 8192  # float32 of the parts of one row that 4 warps hold in registers
_ALIGNMENT = 4  # int32 of the 16 bytes at which the compiler wants pointers to start


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What the kernels read of an `AttentionBatch`: int32, contiguous, on the device."""

    block_tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Weighing:
    """`AttentionOptions` as the kernel wants them: scores to the base 2, None for what is not."""

    sign: int
    """What q is multiplied with: a kernel takes a row's maximum before it scales, which only a
    positive scale leaves alone."""
    scale: float
    cap_scale: float | None
    window: int | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None


@torch.no_grad()
def paged_attention(
    q: torch.Tensor, cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> torch.Tensor:
    """Causal attention over all tokens so far, the new ones included.

    q: `[T, Hq, D]` of the cache's dtype, and of any if that is quantised; any strides. cache: K/V
    of the new tokens in place, not latent.
    Returns `[T, Hq, D]` of q's dtype, new memory.

    Raises InvalidArgumentError on a wrong shape, dtype, device, scale, or a batch that does not
    fit.
    """
    check_attention(q, cache, batch, options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
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
        head_dim=q.shape[2],
        dtype=q.dtype,
        stored=cache.keys.dtype,
    )
    plan = choose_plan(shapes, architecture_of(q.device), num_cores(q.device))
    launch(q, cache, upload(batch, q.device), options, plan, out)
    return out


def upload(batch: AttentionBatch, device: torch.device) -> DeviceBatch:
    """The batch's arrays on `device`, by one copy."""
    arrays = (batch.block_tables, batch.query_start, batch.seq_lens)
    starts = np.cumsum([0] + [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    packed = np.zeros(starts[-1], dtype=np.int32)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.size] = array.ravel()
    memory = torch.from_numpy(packed).to(device)
    tables, query_start, seq_lens = (
        memory[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    )
    return DeviceBatch(tables, query_start, seq_lens)


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
    from prefixcache.attention.kernels.combine import combine_kernel
    from prefixcache.attention.kernels.paged_attention import paged_attention_kernel

    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.keys.shape[1:3]
    group = num_query_heads // num_kv_heads
    block_d = padded_head_dim(head_dim)
    tiles, num_splits = plan.tiles, plan.num_splits
    weighing = _weighing(options, head_dim, q.device)
    scales = cache.scales
    parts, log_sums = out, None
    if num_splits > 1:
        shape = (num_tokens, num_query_heads, num_splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    num_sequences, table_stride = batch.block_tables.shape
    grid = (
        num_tokens // (tiles.rows // plan.group_part) + num_sequences,
        num_kv_heads * -(-group // plan.group_part),
        num_splits,
    )
    with torch.cuda.device_of(q):
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
            BLOCK_D=block_d,
            NUM_SPLITS=num_splits,
            MIN_SPLIT=plan.min_split,
            SIGN=weighing.sign,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if num_splits > 1:
            combine_kernel[(num_tokens * num_query_heads,)](
                parts,
                log_sums,
                out,
                HEAD_DIM=head_dim,
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


def _weighing(options: AttentionOptions, head_dim: int, device: torch.device) -> _Weighing:
    scale = options.scale_for(head_dim)
    sign = (scale > 0) - (scale < 0)
    factor, cap_scale = abs(scale) * _LOG2_E, None
    cap = options.soft_cap
    if factor >= _SMALLEST_FACTOR and cap is not None and cap < _LARGEST_CAP:
        factor, cap_scale = cap * _LOG2_E, min(abs(scale) / cap, _LARGEST_FLOAT32)
    if factor < _SMALLEST_FACTOR:
        sign, factor, cap_scale = 0, 1.0, None
    window = options.window
    return _Weighing(
        sign,
        factor,
        cap_scale,
        None if window is None else min(window, _LARGEST_WINDOW),
        _on_device(options.alibi_slopes, device) if options.alibi_slopes else None,
        _on_device(options.sinks, device) if options.sinks else None,
    )


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Scores, to the base 2: `[Hq] float32`. Kept, since a model's are the same at each call."""
    scores = torch.tensor(numbers, dtype=torch.float64) * _LOG2_E
    return scores.clamp(-_LARGEST_FLOAT32, _LARGEST_FLOAT32).to(device, torch.float32)
