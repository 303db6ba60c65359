"""The work list's kernels: 8 KV heads, 64 sequences that share thousands of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prefixcache.attention.kernels.tree_attention import tree_attention_kernel
from prefixcache.attention.kernels.tree_combine import tree_combine_kernel
from prefixcache.attention.selection import Shapes, choose_tree_plan, padded_head_dim
from prefixcache.attention.tree_attention import PARTS_AT_A_TIME
from tests.aot.cases import (
    CACHE_STRIDES,
    CORES,
    EVERYWHERE,
    OPTIONS,
    SCALE_STRIDES,
    TOKEN_STRIDES,
    TYPES,
    Case,
    Ceiling,
    Launch,
    stored_type,
)

NUM_SEQUENCES = 64


def _combine() -> Launch:
    return Launch(
        {
            "parts": "*fp32:16",
            "log_sums": "*fp32:16",
            "out": "*bf16:16",
            "part_starts": "*i32:16",
            "part_slots": "*i32:16",
            "sinks": None,
            "HEAD_DIM": 128,
            "BLOCK_D": 128,
            "BLOCK_P": PARTS_AT_A_TIME,
        },
        num_warps=1,
    )


def _tree(
    shapes: Shapes, num_queries: int, target: str, scale_strides: Any, options: Mapping[str, str]
) -> Launch:
    """num_queries: of the keys."""
    plan = choose_tree_plan(shapes, NUM_SEQUENCES, target, CORES[target])
    tiles = plan.narrow if num_queries <= plan.max_narrow_queries else plan.wide
    group = shapes.num_query_heads // shapes.num_kv_heads
    scales = None if scale_strides is None else "*fp32:16"
    arguments = {
        "q": f"*{TYPES[shapes.dtype]}:16",
        "key_cache": f"*{stored_type(shapes.stored, target)}:16",
        "value_cache": f"*{stored_type(shapes.stored, target)}:16",
        "key_scales": scales,
        "value_scales": scales,
        "parts": "*fp32:16",
        "log_sums": "*fp32:16",
        "items": "*i32:16",
        "query_tokens": "*i32:16",
        "positions": "*i32:16",
        "block_tables": "*i32:16",
        "scale": "fp32",
        "cap_scale": None,
        "alibi_slopes": None,
        "table_stride": "i32",
        "q_strides": TOKEN_STRIDES,
        "key_strides": CACHE_STRIDES,
        "value_strides": CACHE_STRIDES,
        "key_scale_strides": scale_strides,
        "value_scale_strides": scale_strides,
        "NUM_QUERY_HEADS": shapes.num_query_heads,
        "GROUP": group,
        "GROUP_PART": tiles.group_part(group),
        "HEAD_DIM": shapes.head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "BLOCK_D": padded_head_dim(shapes.head_dim),
        "SIGN": 1,
    }
    return Launch(arguments | options, tiles.num_warps, tiles.num_stages)


def _case(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_queries: int,
    *,
    stored: torch.dtype | None = None,
    scale_strides: tuple[Any, ...] | None = None,
    options: Mapping[str, str] | None = None,
    ceilings: Mapping[str, Ceiling] | None = None,
    targets: tuple[str, ...] = EVERYWHERE,
) -> Case:
    shapes = Shapes(
        num_tokens=NUM_SEQUENCES,
        num_sequences=NUM_SEQUENCES,
        longest_query=1,
        max_seq_len=8192,
        num_query_heads=8 * group,
        num_kv_heads=8,
        head_dim=head_dim,
        dtype=dtype,
        stored=stored or dtype,
    )
    return Case(
        f"tree {name} {TYPES[dtype]} D{head_dim} G{group}",
        tree_attention_kernel,
        lambda target: _tree(shapes, num_queries, target, scale_strides, options or {}),
        has_dots=dtype != torch.float32,
        ceilings=ceilings or {},
        targets=targets,
    )


_EVERY_OPTION = {
    name: kind for name, kind in OPTIONS["all options"].items() if name not in ("window", "sinks")
}
_NVIDIA = ("sm_80", "sm_90")

CASES = (
    Case("tree combine bf16 D128", tree_combine_kernel, lambda _: _combine()),
    _case("private", torch.bfloat16, 128, 4, 1),
    _case("shared", torch.bfloat16, 128, 4, NUM_SEQUENCES),
    _case("shared", torch.float16, 80, 7, NUM_SEQUENCES),
    _case("shared", torch.bfloat16, 256, 8, NUM_SEQUENCES),
    _case("shared", torch.float32, 128, 4, NUM_SEQUENCES),
    _case(
        "shared, all options",
        torch.bfloat16,
        128,
        4,
        NUM_SEQUENCES,
        options=_EVERY_OPTION,
        targets=_NVIDIA,
    ),
    _case(
        "private fp8",
        torch.bfloat16,
        128,
        4,
        1,
        stored=torch.float8_e4m3fn,
        scale_strides=SCALE_STRIDES,
        targets=_NVIDIA,
    ),
    _case(
        "shared fp8",
        torch.bfloat16,
        128,
        4,
        NUM_SEQUENCES,
        stored=torch.float8_e4m3fn,
        scale_strides=SCALE_STRIDES,
        targets=_NVIDIA,
    ),
)
