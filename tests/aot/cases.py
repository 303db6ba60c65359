"""Which kernels are compiled, as their launchers would launch them on each target.

A new kernel needs an entry in `CASES` and a run of `python -m tests.aot --record`. Tiles come from
`selection` and the launchers, so that what is compiled here is what runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefixcache.attention import copy_blocks, write_kv
from prefixcache.attention.kernels.copy_blocks import copy_blocks_kernel
from prefixcache.attention.kernels.write_kv import write_kv_kernel

# A pool's strides are multiples of 16 elements, and a head's elements stand together.
CACHE_STRIDES = ("i32:16", "i32:16", "i32:16", 1)
TOKEN_STRIDES = ("i32:16", "i32:16", 1)


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


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with the shapes of one use."""

    name: str
    kernel: Any
    launch_on: Callable[[str], Launch]
    """The launch on a target."""
    moves_only: bool = False
    """Copies memory: every store is 16 bytes wide."""
    has_dots: bool = False
    """Multiplies matrices of 16-bit floats: on tensor cores, from K/V loaded asynchronously."""
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    """By target; elsewhere nothing may spill."""


def _write_kv(dtype: str, head_dim: int) -> Launch:
    block_d = 1 << (head_dim - 1).bit_length()
    return Launch(
        {
            "key_cache": f"*{dtype}:16",
            "value_cache": f"*{dtype}:16",
            "k": f"*{dtype}:16",
            "v": f"*{dtype}:16",
            "slot_mapping": "*i64:16",
            "num_rows": "i32",
            "key_cache_strides": CACHE_STRIDES,
            "value_cache_strides": CACHE_STRIDES,
            "k_strides": TOKEN_STRIDES,
            "v_strides": TOKEN_STRIDES,
            "NUM_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "TILE_ROWS": write_kv.TILE_ELEMENTS // block_d,
        }
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


CASES = (
    Case("copy_blocks", copy_blocks_kernel, lambda _: _copy_blocks(), moves_only=True),
    Case("write_kv bf16 D128", write_kv_kernel, lambda _: _write_kv("bf16", 128), moves_only=True),
    Case("write_kv fp32 D80", write_kv_kernel, lambda _: _write_kv("fp32", 80), moves_only=True),
)
