"""Launcher of the Triton kernels that read blocks which sequences share once for all of them.

`paged_attention` comes here where `selection` says so. The work list is made and uploaded once a
step, in one copy, and kept with the batch; a layer launches one kernel for the items with few
queries, one for those with many, and one that joins their parts.

Threads: pure but for reading the cache; nobody may write those blocks meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.device_batch import upload_arrays
from prefixcache.attention.selection import (
    Shapes,
    Tiles,
    TreePlan,
    architecture_of,
    as_loaded,
    choose_tree_plan,
    num_cores,
    padded_head_dim,
)
from prefixcache.attention.shared_prefix import SharedPrefix
from prefixcache.attention.tree_work import make_work
from prefixcache.attention.weighing import Weighing, weigh
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

PARTS_AT_A_TIME = 8


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A `TreeWork` and the block tables on the device: int32, contiguous."""

    narrow_items: torch.Tensor
    wide_items: torch.Tensor
    query_tokens: torch.Tensor
    positions: torch.Tensor
    part_starts: torch.Tensor
    part_slots: torch.Tensor
    block_tables: torch.Tensor


def tree_attention(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    prefix: SharedPrefix,
    shapes: Shapes,
    out: torch.Tensor,
) -> None:
    """`paged_attention` of checked arguments into `out`; T > 0.

    Neither latent K/V nor a window. shapes: of the call.
    """
    run_queries = int((prefix.run_end_queries - prefix.run_first_queries).max())
    most_queries = max(run_queries, shapes.longest_query)
    plan = choose_tree_plan(shapes, most_queries, architecture_of(q.device), num_cores(q.device))
    work = batch.derive(
        ("tree_work", cache.keys.shape[2], plan, q.device),
        lambda: upload_work(batch, prefix, plan, q.device),
    )
    launch_tree(q, cache, work, options, plan, out)


def upload_work(
    batch: AttentionBatch, prefix: SharedPrefix, plan: TreePlan, device: torch.device
) -> DeviceWork:
    """The work list of a plan on `device`, by one copy."""
    work = make_work(batch, prefix, plan.max_narrow_queries, plan.narrow_limits, plan.wide_limits)
    arrays = (
        work.narrow_items,
        work.wide_items,
        work.query_tokens,
        work.positions,
        work.part_starts,
        work.part_slots,
        batch.block_tables,
    )
    return DeviceWork(*upload_arrays(arrays, device))


def launch_tree(
    q: torch.Tensor,
    cache: KVCache,
    work: DeviceWork,
    options: AttentionOptions,
    plan: TreePlan,
    out: torch.Tensor,
) -> None:
    """The work list's three launches, with `out` contiguous. Nothing waits for the device."""
    from prefixcache.attention.kernels.tree_combine import tree_combine_kernel

    num_tokens, num_query_heads, head_dim = q.shape
    weighing = weigh(options, head_dim, q.device)
    num_parts = len(work.part_slots)
    parts = q.new_empty(num_parts, num_query_heads, head_dim, dtype=torch.float32)
    log_sums = q.new_empty(num_parts, num_query_heads, dtype=torch.float32)
    with torch.cuda.device_of(q):
        for items, tiles in ((work.narrow_items, plan.narrow), (work.wide_items, plan.wide)):
            if len(items) > 0:
                _launch_items(q, cache, work, items, weighing, tiles, parts, log_sums)
        tree_combine_kernel[(num_tokens, num_query_heads)](
            parts,
            log_sums,
            out,
            work.part_starts,
            work.part_slots,
            weighing.sinks,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_P=PARTS_AT_A_TIME,
            num_warps=1,
        )


def _launch_items(
    q: torch.Tensor,
    cache: KVCache,
    work: DeviceWork,
    items: torch.Tensor,
    weighing: Weighing,
    tiles: Tiles,
    parts: torch.Tensor,
    log_sums: torch.Tensor,
) -> None:
    from prefixcache.attention.kernels.tree_attention import tree_attention_kernel

    num_kv_heads, block_size, head_dim = cache.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    group_part = tiles.group_part(group)
    scales = cache.scales
    tree_attention_kernel[(len(items), num_kv_heads * -(-group // group_part))](
        q,
        as_loaded(cache.keys),
        as_loaded(cache.values),
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        parts,
        log_sums,
        items,
        work.query_tokens,
        work.positions,
        work.block_tables,
        weighing.scale,
        weighing.cap_scale,
        weighing.alibi_slopes,
        work.block_tables.shape[1],
        q.stride(),
        cache.keys.stride(),
        cache.values.stride(),
        None if scales is None else scales.keys.stride(),
        None if scales is None else scales.values.stride(),
        NUM_QUERY_HEADS=q.shape[1],
        GROUP=group,
        GROUP_PART=group_part,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=padded_head_dim(head_dim),
        SIGN=weighing.sign,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
