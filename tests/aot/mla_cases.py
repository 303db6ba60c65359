"""The kernel over latents as its launcher would launch it, with DeepSeek's 512 + 64 elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prefixcache.attention.kernels.combine import combine_kernel
from prefixcache.attention.kernels.mla import mla_kernel
from prefixcache.attention.selection import Shapes, choose_plan, padded_head_dim
from tests.aot.cases import (
    CACHE_STRIDES,
    CORES,
    EVERYWHERE,
    OPTIONS,
    TOKEN_STRIDES,
    TYPES,
    Case,
    Ceiling,
    Launch,
    under_triton,
)


def _mla(shapes: Shapes, rope_dim: int, target: str, options: dict[str, str]) -> Launch:
    plan = choose_plan(shapes, target, CORES[target])
    dtype = TYPES[shapes.dtype]
    arguments: dict[str, Any] = {
        "q": f"*{dtype}:16",
        "cache": f"*{dtype}:16",
        "out": "*fp32:16" if plan.num_splits > 1 else f"*{dtype}:16",
        "log_sums": "*fp32:16" if plan.num_splits > 1 else None,
        "block_tables": "*i32:16",
        "query_start": "*i32:16",
        "seq_lens": "*i32:16",
        "scale": "fp32",
        "cap_scale": None,
        "alibi_slopes": None,
        "sinks": None,
        "window": None,
        "num_sequences": "i32",
        "table_stride": "i32",
        "q_strides": TOKEN_STRIDES,
        "cache_strides": CACHE_STRIDES,
        "NUM_HEADS": shapes.num_query_heads,
        "HEADS_PART": plan.group_part,
        "LATENT_DIM": shapes.head_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_M": plan.tiles.rows,
        "BLOCK_N": plan.tiles.keys,
        "BLOCK_R": padded_head_dim(shapes.head_dim),
        "BLOCK_P": padded_head_dim(rope_dim),
        "NUM_SPLITS": plan.num_splits,
        "MIN_SPLIT": plan.min_split,
        "SIGN": 1,
    }
    return Launch(arguments | options, plan.tiles.num_warps, plan.tiles.num_stages)


def _mla_case(
    name: str,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    longest_query: int = 1,
    num_sequences: int = 1024,
    latent_dim: int = 512,
    rope_dim: int = 64,
    options: str | None = None,
    targets: tuple[str, ...] = EVERYWHERE,
    ceilings: Mapping[str, Ceiling] | None = None,
) -> Case:
    """Over 8k tokens; 1024 sequences need no splits. `name` is completed by dtype and heads."""
    shapes = Shapes(
        num_tokens=num_sequences * longest_query,
        num_sequences=num_sequences,
        longest_query=longest_query,
        max_seq_len=8192,
        num_query_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent_dim,
        dtype=dtype,
        stored=dtype,
        is_latent=True,
    )
    changed = OPTIONS[options] if options else {}
    return Case(
        f"mla {name} {TYPES[dtype]} H{num_heads}",
        mla_kernel,
        lambda target: _mla(shapes, rope_dim, target, changed),
        has_dots=dtype != torch.float32,
        ceilings=ceilings or {},
        targets=targets,
    )


def _combine() -> Launch:
    return Launch(
        {
            "parts": "*fp32:16",
            "log_sums": "*fp32:16",
            "out": "*bf16:16",
            "HEAD_DIM": 512,
            "BLOCK_D": 512,
            "NUM_PARTS": 64,
            "sinks": None,
            "NUM_HEADS": 128,
        },
        num_warps=8,
    )


_NVIDIA = ("sm_80", "sm_90")
_IN_LOOP = Ceiling(12, "reloads 5 registers a tile")
_OUTSIDE = Ceiling(2, "keeps one address in memory")

CASES = (
    _mla_case("decode", 16),
    _mla_case("decode, split", 16, num_sequences=1),
    _mla_case("decode", 32, ceilings=under_triton("3.6.0", {"sm_90": _IN_LOOP})),
    _mla_case("decode", 64, dtype=torch.float16),
    _mla_case("decode", 128),
    _mla_case("decode, split", 128, num_sequences=1),
    _mla_case("decode", 16, dtype=torch.float32),
    _mla_case(
        "prefill",
        16,
        longest_query=2048,
        num_sequences=4,
        ceilings=under_triton("3.6.0", {"sm_90": _OUTSIDE}),
    ),
    _mla_case("decode of R256 P32", 40, latent_dim=256, rope_dim=32, targets=_NVIDIA),
    _mla_case("decode, all options", 16, options="all options", targets=_NVIDIA),
    _mla_case("decode, all options", 128, options="all options", targets=_NVIDIA),
    Case("combine bf16 D512", combine_kernel, lambda _: _combine()),
)
