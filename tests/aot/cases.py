"""Which kernels are compiled, as their launchers would launch them on each target.

A new kernel needs an entry in `CASES` and a run of `python -m tests.aot --record`. Tiles come from
`selection` and the launchers, so that what is compiled here is what runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from prefixcache.attention import copy_blocks, write_kv
from prefixcache.attention.kernels.combine import combine_kernel
from prefixcache.attention.kernels.copy_blocks import copy_blocks_kernel
from prefixcache.attention.kernels.paged_attention import paged_attention_kernel
from prefixcache.attention.kernels.write_kv import write_kv_kernel
from prefixcache.attention.selection import (
    FLOAT8_ARCHITECTURES,
    Shapes,
    choose_plan,
    padded_head_dim,
)

# A pool's strides are multiples of 16 elements, and a head's elements stand together.
CACHE_STRIDES = ("i32:16", "i32:16", "i32:16", 1)
TOKEN_STRIDES = ("i32:16", "i32:16", 1)
CORES = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
SCALE_STRIDES = ("i32:16", "i32:16", 1)
FIXED_SCALE_STRIDES = ("i32:16", "i32:16", "i32:16")  # 0 over heads and tokens
EVERYWHERE = ("sm_80", "sm_90", "sm_100", "gfx942")
OPTIONS = {
    "window": {"window": "i32"},
    "all options": {
        "window": "i32",
        "cap_scale": "fp32",
        "alibi_slopes": "*fp32:16",
        "sinks": "*fp32:16",
    },
}


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments as `compile_kernel` wants them, and the options of the launch."""

    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Spills that are put up with."""

    spills: int
    reason: str


def under_triton(version: str, ceilings: Mapping[str, Ceiling]) -> Mapping[str, Ceiling]:
    """By target; what one version alone needs."""
    return ceilings if triton.__version__ == version else {}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with the shapes of one use."""

    name: str
    kernel: Any
    launch_on: Callable[[str], Launch]
    """The launch on a target."""
    moves_only: bool = False
    """Copies memory: every store is 16 bytes wide."""
    quantizes: bool = False
    """Stores a byte an element: 16 bytes loaded are 8 or 4 stored, and a scale has 4."""
    has_dots: bool = False
    """Multiplies matrices of 16-bit floats: on tensor cores, from K/V loaded asynchronously."""
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    """By target; elsewhere nothing may spill."""
    targets: tuple[str, ...] = EVERYWHERE


def stored_type(stored: torch.dtype, target: str) -> str:
    """How kernels for a target take an element of the cache."""
    if stored == torch.float8_e4m3fn and target not in FLOAT8_ARCHITECTURES:
        return "u8"
    return TYPES[stored]


def _write_kv(
    target: str, dtype: torch.dtype, head_dim: int, stored: torch.dtype, *, is_fixed: bool = False
) -> Launch:
    block_d = 1 << (head_dim - 1).bit_length()
    element = stored_type(stored, target)
    scales, scale_strides = None, None
    if stored != dtype:
        scales, scale_strides = "*fp32:16", FIXED_SCALE_STRIDES if is_fixed else SCALE_STRIDES
    return Launch(
        {
            "key_cache": f"*{element}:16",
            "value_cache": f"*{element}:16",
            "key_scales": scales,
            "value_scales": scales,
            "k": f"*{TYPES[dtype]}:16",
            "v": f"*{TYPES[dtype]}:16",
            "slot_mapping": "*i64:16",
            "fixed_key_scale": "fp32" if is_fixed else None,
            "fixed_value_scale": "fp32" if is_fixed else None,
            "num_rows": "i32",
            "key_cache_strides": CACHE_STRIDES,
            "value_cache_strides": CACHE_STRIDES,
            "key_scale_strides": scale_strides,
            "value_scale_strides": scale_strides,
            "k_strides": TOKEN_STRIDES,
            "v_strides": TOKEN_STRIDES,
            "NUM_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "TILE_ROWS": write_kv.TILE_ELEMENTS // block_d,
        }
    )


def _write_case(
    name: str, dtype: torch.dtype, head_dim: int, stored: torch.dtype | None = None, **kind: bool
) -> Case:
    """`name` is completed by dtype and head dim."""
    return Case(
        f"{name} {TYPES[dtype]} D{head_dim}",
        write_kv_kernel,
        lambda target: _write_kv(target, dtype, head_dim, stored or dtype, **kind),
        moves_only=stored is None,
        quantizes=stored is not None,
    )


def _copy_blocks() -> Launch:
    return Launch(
        {
            "sources": "*i32:16",
            "destinations": "*i32:16",
            "source_ids": "*i64",
            "destination_ids": "*i64",
            "block_words": "i32:16",
            "TILE_WORDS": copy_blocks.TILE_BYTES // 4,
        }
    )


def _combine() -> Launch:
    return Launch(
        {
            "parts": "*fp32:16",
            "log_sums": "*fp32:16",
            "out": "*bf16:16",
            "HEAD_DIM": 128,
            "BLOCK_D": 128,
            "NUM_PARTS": 32,
            "sinks": None,
            "NUM_HEADS": 1,
        }
    )


def _attention(
    shapes: Shapes, target: str, scale_strides: tuple[Any, ...] | None, options: Mapping[str, str]
) -> Launch:
    plan = choose_plan(shapes, target, CORES[target])
    dtype, stored = TYPES[shapes.dtype], stored_type(shapes.stored, target)
    scales = None if scale_strides is None else "*fp32:16"
    arguments = {
        "q": f"*{dtype}:16",
        "key_cache": f"*{stored}:16",
        "value_cache": f"*{stored}:16",
        "key_scales": scales,
        "value_scales": scales,
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
        "key_strides": CACHE_STRIDES,
        "value_strides": CACHE_STRIDES,
        "key_scale_strides": scale_strides,
        "value_scale_strides": scale_strides,
        "NUM_QUERY_HEADS": shapes.num_query_heads,
        "GROUP": shapes.num_query_heads // shapes.num_kv_heads,
        "GROUP_PART": plan.group_part,
        "HEAD_DIM": shapes.head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_M": plan.tiles.rows,
        "BLOCK_N": plan.tiles.keys,
        "BLOCK_D": padded_head_dim(shapes.head_dim),
        "NUM_SPLITS": plan.num_splits,
        "MIN_SPLIT": plan.min_split,
        "SIGN": 1,
    }
    return Launch(arguments | options, plan.tiles.num_warps, plan.tiles.num_stages)


def _attention_case(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    longest_query: int = 1,
    num_sequences: int = 64,
    ceilings: Mapping[str, Ceiling] | None = None,
    stored: torch.dtype | None = None,
    scale_strides: tuple[Any, ...] | None = None,
    options: str | None = None,
    targets: tuple[str, ...] = EVERYWHERE,
) -> Case:
    """8 KV heads over 8k tokens; `name` is completed by dtype, head dim and group."""
    shapes = Shapes(
        num_tokens=num_sequences * longest_query,
        num_sequences=num_sequences,
        longest_query=longest_query,
        max_seq_len=8192,
        num_query_heads=8 * group,
        num_kv_heads=8,
        head_dim=head_dim,
        dtype=dtype,
        stored=stored or dtype,
    )
    changed = OPTIONS[options] if options else {}
    return Case(
        f"{name} {TYPES[dtype]} D{head_dim} G{group}",
        paged_attention_kernel,
        lambda target: _attention(shapes, target, scale_strides, changed),
        has_dots=dtype != torch.float32,
        ceilings=ceilings or {},
        targets=targets,
    )


def _quantized_case(
    name: str,
    stored: torch.dtype,
    targets: tuple[str, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    is_fixed: bool = False,
    **shapes: Any,
) -> Case:
    """8 bits of K/V, a scale for each token and head or for each block."""
    strides = FIXED_SCALE_STRIDES if is_fixed else SCALE_STRIDES
    return _attention_case(
        name,
        dtype,
        head_dim,
        4,
        stored=stored,
        scale_strides=strides,
        targets=targets,
        **shapes,
    )


_PROMPTS = {"longest_query": 2048, "num_sequences": 4}
_NVIDIA = ("sm_80", "sm_90")

CASES = (
    Case("copy_blocks", copy_blocks_kernel, lambda _: _copy_blocks(), moves_only=True),
    _write_case("write_kv", torch.bfloat16, 128),
    _write_case("write_kv", torch.float32, 80),
    _write_case("write_kv fp8", torch.bfloat16, 128, torch.float8_e4m3fn),
    _write_case("write_kv fp8 fixed", torch.float16, 80, torch.float8_e4m3fn, is_fixed=True),
    _write_case("write_kv int8", torch.bfloat16, 128, torch.int8),
    Case("combine bf16 D128", combine_kernel, lambda _: _combine()),
    _attention_case("decode", torch.bfloat16, 128, 4),
    _attention_case("decode, split", torch.bfloat16, 128, 4, num_sequences=1),
    _attention_case("decode", torch.float16, 80, 7),
    _attention_case("decode", torch.bfloat16, 256, 8),
    _attention_case("decode", torch.float32, 64, 1),
    _attention_case("drafts", torch.bfloat16, 128, 8, longest_query=4),
    _attention_case("drafts", torch.bfloat16, 256, 8, longest_query=4),
    _attention_case("prefill", torch.bfloat16, 128, 4, longest_query=2048, num_sequences=4),
    _attention_case("prefill", torch.float16, 96, 7, longest_query=2048, num_sequences=4),
    _attention_case("prefill", torch.bfloat16, 256, 2, longest_query=2048, num_sequences=4),
    _attention_case("prefill", torch.float32, 128, 4, longest_query=2048, num_sequences=4),
    _attention_case("decode, window", torch.bfloat16, 128, 4, options="window", targets=_NVIDIA),
    _attention_case(
        "decode, all options",
        torch.bfloat16,
        128,
        4,
        options="all options",
        targets=_NVIDIA,
        ceilings=under_triton(
            "3.6.0", {"sm_80": Ceiling(4, "one value, to keep to the registers of three programs")}
        ),
    ),
    _attention_case(
        "prefill, all options",
        torch.bfloat16,
        128,
        4,
        options="all options",
        targets=_NVIDIA,
        **_PROMPTS,
    ),
    _quantized_case("decode fp8", torch.float8_e4m3fn, EVERYWHERE),
    _quantized_case("decode fp8 fixed", torch.float8_e4m3fn, _NVIDIA, is_fixed=True),
    _quantized_case("decode int8", torch.int8, _NVIDIA),
    _quantized_case("prefill fp8", torch.float8_e4m3fn, _NVIDIA, **_PROMPTS),
    _quantized_case(
        "prefill fp8",
        torch.float8_e4m3fn,
        _NVIDIA,
        head_dim=256,
        ceilings=under_triton(
            "3.6.0", {"sm_90": Ceiling(16, "all 255 registers; fewer rows would have no HGMMA")}
        ),
        **_PROMPTS,
    ),
    _quantized_case("prefill int8", torch.int8, _NVIDIA, dtype=torch.float32, **_PROMPTS),
)
