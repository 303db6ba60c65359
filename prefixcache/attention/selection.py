"""Which tiles and how many splits the Triton kernels run with, and whether blocks that sequences
share are read once for all of them: the one place that decides.

From shapes, dtype and architecture alone, so that nothing is tuned while a daemon serves. Imports
no triton. Pure, but for asking torch about a device once.

The tables hold what was found by compiling ahead of time with triton 3.7.1 and reading the machine
code: tensor-core instructions, spills, and the most registers that any group, with splits or
without, took. No entry has been timed on a device yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

from prefixcache.attention.batch import AttentionBatch, PrefixSharing
from prefixcache.attention.shared_prefix import SharedPrefix
from prefixcache.attention.tree_work import ItemLimits
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

_MAX_SPLITS = 64  # `combine` joins so many in one program's registers
_SPLIT_STEP = 4  # each count is a kernel to compile, and a split without keys costs next to nothing
_WARPS_OF_A_CORE = 12  # of these kernels, whose registers bound it: 150 to 180 a thread
_TILES_OF_A_SPLIT = 4  # below that, starting a program costs more than its share of the reading
_SMALLEST_DOT = 16  # tl.dot takes no smaller side
FLOAT8_ARCHITECTURES = {"sm_90", "sm_100", "interpreter"}
"""Those that convert float8 e4m3; elsewhere kernels take its bytes apart."""
MIN_SAVED_BYTES = 2**22
"""K/V that a layer must read less so that shared blocks are read once: what the torch path reads on
CPU while it sets up another matrix (measured)."""
MIN_SAVED_BYTES_ON_GPU = 2**24
"""The same on a GPU: what it reads while it starts a kernel."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How much one program of `paged_attention` computes at a time, and with what."""

    rows: int
    """Of the query matrix: tokens x heads of a group. A power of two >= 16."""
    keys: int
    """Of one step. A power of two >= 16."""
    num_warps: int
    num_stages: int
    """Of the compiler's pipeline, in which the block table goes ahead of K/V: with 3 the K/V of one
    step are in shared memory or on their way at a time, with 5 of two; of one more with wgmma."""

    def group_part(self, group: int) -> int:
        """Heads of a group that one program computes: all of them if they fit into its rows."""
        return -(-group // -(-group // self.rows))


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of a table: the first one whose limits hold is taken. None is no limit."""

    max_rows: int | None
    """Tokens of the longest query times the group."""
    max_head_dim: int | None
    """After padding."""
    max_element_bytes: int | None
    tiles: Tiles
    reason: str
    max_stored_bytes: int | None = None
    """Of an element in the cache: 1 is for quantised caches alone."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is known of a call on the host without reading a length of its contexts."""

    num_tokens: int
    num_sequences: int
    longest_query: int
    """Tokens; an upper bound will do."""
    max_seq_len: int
    """Tokens that the block tables have entries for."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of q."""
    stored: torch.dtype
    """Of K/V in the cache."""
    is_latent: bool = False
    """Then `head_dim` is that of V, which the sums have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch of `paged_attention`."""

    tiles: Tiles
    group_part: int
    """See `Tiles.group_part`."""
    num_splits: int
    """Runs that a sequence's keys are cut into at most; a power of two."""
    min_split: int
    """Keys below which a run is not cut further; a multiple of `tiles.keys`."""


_FLOAT32 = (
    Rule(16, 128, 4, Tiles(16, 32, 8, 3), "no tensor cores; 70 registers, with 4 warps 148 spills"),
    Rule(None, 128, 4, Tiles(32, 16, 4, 3), "161 registers; 8 warps: up to 12 spills (triton 3.6)"),
    Rule(None, 256, 4, Tiles(16, 16, 8, 3), "100 registers"),
)
# 8-bit K/V, which become 16 or 32 bits in registers.
_QUANTIZED_DECODE = Rule(
    16, 128, 2, Tiles(16, 32, 4, 5), "166 registers: three programs a core; 64 keys: 242", 1
)
_QUANTIZED_FLOAT32 = (
    Rule(None, 128, 4, Tiles(16, 32, 8, 1), "74 registers; with 3 stages 163 spills", 1),
    Rule(None, 256, 4, Tiles(16, 16, 8, 1), "80 registers; with 3 stages 202 spills", 1),
)
_SMALLEST = Tiles(16, 16, 8, 1)
_LARGE_HEADS = Rule(None, None, None, _SMALLEST, "larger heads: the smallest tiles there are")

TABLES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        # At most 68 KiB of shared memory, so that cards with 99 KiB can take the table too.
        "sm_80": (
            Rule(16, 128, 2, Tiles(16, 32, 4, 3), "168 registers; 5 stages: 4 spills", 1),
            Rule(16, 128, 2, Tiles(16, 64, 4, 3), "memory bound: three programs a core fit"),
            Rule(16, 256, 2, Tiles(16, 32, 8, 3), "128 registers; 4 warps: 6 spills"),
            Rule(None, 128, 2, Tiles(64, 32, 8, 3), "206 registers; 64 keys: 255", 1),
            Rule(None, 256, 2, Tiles(32, 32, 8, 2), "172 registers; 64 rows: 4 spills", 1),
            # 128 rows: 15 to 24 spills with splits or a group that is no power of two.
            Rule(None, 128, 2, Tiles(64, 64, 8, 3), "190 registers; 4 warps: 45 spills"),
            Rule(None, 256, 2, Tiles(64, 32, 8, 2), "234 registers; more rows or keys spill"),
            *_QUANTIZED_FLOAT32,
            *_FLOAT32,
            _LARGE_HEADS,
        ),
        "sm_90": (
            _QUANTIZED_DECODE,
            Rule(16, 128, 2, Tiles(16, 64, 4, 3), "memory bound: three programs a core fit"),
            Rule(16, 256, 2, Tiles(16, 32, 4, 3), "188 registers; half the keys, the same bytes"),
            Rule(64, 128, 2, Tiles(64, 64, 4, 3), "one warp group: HGMMA, 244 registers, 81 KiB"),
            Rule(None, 128, 2, Tiles(128, 64, 8, 3), "two warp groups: HGMMA, 220 registers"),
            Rule(None, 256, 2, Tiles(64, 32, 8, 2), "HGMMA, 255 registers; 64 keys: 114 spills", 1),
            Rule(64, 256, 2, Tiles(64, 64, 8, 2), "HGMMA, 255 registers, 160 KiB"),
            Rule(None, 256, 2, Tiles(128, 32, 8, 2), "HGMMA, 255 registers; 64 keys: 12 spills"),
            *_QUANTIZED_FLOAT32,
            *_FLOAT32,
            _LARGE_HEADS,
        ),
        "sm_100": (
            _QUANTIZED_DECODE,
            Rule(16, 128, 2, Tiles(16, 64, 4, 3), "memory bound: three programs a core fit"),
            Rule(16, 256, 2, Tiles(16, 32, 4, 3), "186 registers; half the keys, the same bytes"),
            Rule(64, 128, 2, Tiles(64, 64, 8, 3), "tcgen05, 119 registers; 4 warps: more code"),
            Rule(None, 128, 2, Tiles(128, 64, 8, 3), "tcgen05, 212 registers, 97 KiB"),
            # 128 rows of 32 keys: 50 spills with splits and a group that is no power of two.
            Rule(None, 256, 2, Tiles(64, 64, 8, 2), "tcgen05, 200 registers; 32 keys: 12 spills"),
            *_QUANTIZED_FLOAT32,
            *_FLOAT32,
            _LARGE_HEADS,
        ),
        # 64 KiB of shared memory.
        "gfx942": (
            Rule(16, 128, 2, Tiles(16, 32, 4, 2), "16 KiB: four programs a core; 64 keys: two"),
            Rule(16, 256, 2, Tiles(16, 32, 4, 2), "172 registers, 32 KiB"),
            Rule(64, 128, 2, Tiles(64, 32, 4, 2), "180 registers; 64 keys: 242"),
            Rule(None, 128, 2, Tiles(128, 32, 8, 2), "159 registers, 32 KiB"),
            Rule(None, 256, 2, Tiles(64, 16, 8, 1), "179 registers; 32 keys: 66 spills", 1),
            Rule(None, 256, 2, Tiles(64, 32, 8, 1), "195 registers"),
            *_QUANTIZED_FLOAT32,
            Rule(16, 128, 4, Tiles(16, 32, 8, 1), "165 registers"),
            Rule(None, 128, 4, Tiles(32, 16, 8, 1), "118 registers"),
            Rule(None, 256, 4, Tiles(16, 16, 8, 1), "157 registers"),
            Rule(None, None, None, _SMALLEST, "over 256 elements; float32 of 512: 129 spills"),
        ),
        "interpreter": (
            Rule(None, None, None, Tiles(16, 16, 1, 1), "short tests then cross several tiles"),
        ),
    }
)
"""Rules by architecture: a CUDA one, `gfx942` for all of ROCm, or triton's interpreter."""

_LATENT_FLOAT32 = Rule(None, 512, 4, Tiles(16, 16, 8, 3), "no tensor cores; 126 registers, 73 KiB")

LATENT_TABLES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        # 5 stages are the block table's, and two tiles on their way while a third is used; with 3
        # a tile starts when the one before has been used (wgmma: is about to be).
        # At most 99 KiB.
        "sm_80": (
            Rule(16, 512, 2, Tiles(16, 32, 4, 5), "223 registers, 92 KiB; 8 warps: scores twice"),
            Rule(None, 512, 2, Tiles(32, 32, 4, 3), "255 registers; 74 KiB: two programs a core"),
            _LATENT_FLOAT32,
            _LARGE_HEADS,
        ),
        "sm_90": (
            Rule(16, 512, 2, Tiles(16, 32, 4, 5), "180 registers; 92 KiB: two programs a core"),
            Rule(32, 512, 2, Tiles(32, 32, 4, 5), "255 registers; 111 KiB: two programs a core"),
            # 32 keys and 5 stages: wgmma of 16 columns reads q twice as often.
            Rule(None, 512, 2, Tiles(64, 64, 8, 3), "HGMMA, 254 registers, 217 KiB; 5 stages: 290"),
            _LATENT_FLOAT32,
            _LARGE_HEADS,
        ),
        "sm_100": (
            Rule(16, 512, 2, Tiles(16, 32, 4, 5), "219 registers; 92 KiB: two programs a core"),
            Rule(None, 512, 2, Tiles(64, 32, 8, 3), "tcgen05, 250 registers; 64 keys: 345 KiB"),
            _LATENT_FLOAT32,
            _LARGE_HEADS,
        ),
        "gfx942": (
            Rule(16, 512, 2, Tiles(16, 32, 8, 2), "182 registers, 36 KiB"),
            Rule(None, 512, 2, Tiles(32, 16, 8, 2), "181 registers; 32 keys: 17 spills"),
            Rule(None, 512, 4, Tiles(16, 16, 8, 2), "252 registers"),
            Rule(None, None, None, _SMALLEST, "over 512 elements: 47 spills, float32 305"),
        ),
        "interpreter": (
            Rule(None, None, None, Tiles(16, 16, 1, 1), "short tests then cross several tiles"),
        ),
    }
)
"""Rules for latent K/V, of R latent and P rope elements: `max_head_dim` is R, registers and bytes
are with P = 64."""


# What `tree_attention` takes instead of a tile of the tables. Float32: 78 registers; with 4 warps
# it has 333 spills on sm_90, where `paged_attention` has none.
_TREE_TILES = {Tiles(32, 16, 4, 3): Tiles(32, 16, 8, 3)}


def choose_plan(shapes: Shapes, architecture: str, cores: int) -> Plan:
    """The plan for a call on a device with so many cores (multiprocessors)."""
    return plan_with(find_rule(shapes, architecture).tiles, shapes, cores)


def plan_with(tiles: Tiles, shapes: Shapes, cores: int) -> Plan:
    """The plan with these tiles.

    Splits are for calls whose programs leave cores idle; few tokens with long contexts.
    """
    group = shapes.num_query_heads // shapes.num_kv_heads
    group_part = tiles.group_part(group)
    group_parts = -(-group // group_part)
    parts = max(shapes.num_sequences, shapes.num_tokens // (tiles.rows // group_part))
    programs = parts * shapes.num_kv_heads * group_parts
    wanted = _num_programs(tiles, cores)
    min_split = tiles.keys * _TILES_OF_A_SPLIT
    num_splits = 1
    while (
        num_splits < _MAX_SPLITS
        and programs * num_splits < wanted
        and min_split * num_splits < shapes.max_seq_len
    ):
        num_splits *= _SPLIT_STEP
    return Plan(tiles, group_part, num_splits, min_split)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The launches of `tree_attention`."""

    narrow: Tiles
    wide: Tiles
    narrow_limits: ItemLimits
    wide_limits: ItemLimits
    max_narrow_queries: int
    """Of keys that go to the narrow tiles."""


def choose_tree_plan(shapes: Shapes, most_queries: int, architecture: str, cores: int) -> TreePlan:
    """The tiles of the same tables for keys with few queries, and for those with `most_queries`."""
    group = shapes.num_query_heads // shapes.num_kv_heads
    narrow = find_rule(replace(shapes, longest_query=1), architecture).tiles
    wide = find_rule(replace(shapes, longest_query=most_queries), architecture).tiles
    wide = _TREE_TILES.get(wide, wide)
    return TreePlan(
        narrow,
        wide,
        _item_limits(shapes, narrow, cores),
        _item_limits(shapes, wide, cores),
        narrow.rows // group,
    )


def _item_limits(shapes: Shapes, tiles: Tiles, cores: int) -> ItemLimits:
    group = shapes.num_query_heads // shapes.num_kv_heads
    group_part = tiles.group_part(group)
    programs_of_an_item = shapes.num_kv_heads * -(-group // group_part)
    return ItemLimits(
        num_queries=tiles.rows // group_part,
        key_step=tiles.keys,
        min_keys=tiles.keys * _TILES_OF_A_SPLIT,
        num_items=max(1, _num_programs(tiles, cores) // programs_of_an_item),
    )


def _num_programs(tiles: Tiles, cores: int) -> int:
    """That a device runs at a time."""
    return cores * max(1, _WARPS_OF_A_CORE // tiles.num_warps)


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a tile has elements: its surplus is masked."""
    return max(_SMALLEST_DOT, 1 << (head_dim - 1).bit_length())


@cache
def architecture_of(device: torch.device) -> str:
    """The key of `TABLES` for a device."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    # 12.x are cards for desktops: tensor cores and shared memory (99 KiB) like those of 8.x.
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_80")


def as_loaded(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the cache as kernels take it: float8 as bytes where the device has no float8."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    if architecture_of(tensor.device) in FLOAT8_ARCHITECTURES:
        return tensor
    return tensor.view(torch.uint8)


@cache
def num_cores(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def find_rule(shapes: Shapes, architecture: str) -> Rule:
    """The first rule of the architecture's table whose limits hold."""
    rows = shapes.longest_query * (shapes.num_query_heads // shapes.num_kv_heads)
    head_dim = padded_head_dim(shapes.head_dim)
    return next(
        rule
        for rule in (LATENT_TABLES if shapes.is_latent else TABLES)[architecture]
        if (rule.max_rows is None or rows <= rule.max_rows)
        and (rule.max_head_dim is None or head_dim <= rule.max_head_dim)
        and (rule.max_element_bytes is None or shapes.dtype.itemsize <= rule.max_element_bytes)
        and (rule.max_stored_bytes is None or shapes.stored.itemsize <= rule.max_stored_bytes)
    )


def choose_shared_prefix(
    cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> SharedPrefix | None:
    """How to read shared blocks once; None where each sequence had better read all of its own.

    So it does under a window, where a query sees the end of a run only, if any of it.
    """
    if options.window is not None:
        return None
    _, num_kv_heads, block_size, head_dim = cache.keys.shape
    plan = batch.shared_prefix(block_size)
    if plan is None or batch.prefix_sharing is PrefixSharing.ALWAYS:
        return plan
    num_elements = num_kv_heads * (head_dim + (0 if cache.is_latent else cache.values.shape[3]))
    saved_bytes = plan.saved_tokens * num_elements * cache.keys.dtype.itemsize
    least = MIN_SAVED_BYTES_ON_GPU if cache.keys.is_cuda else MIN_SAVED_BYTES
    return plan if saved_bytes >= least else None
