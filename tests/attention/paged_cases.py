"""Random sequences in a pool whose every other slot is poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.reference.attention import attention
from prefixcache.attention.reference.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache, KVScales
from prefixcache.types import AttentionOptions

NUM_LAYERS = 2
SPARE_BLOCKS = 3
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = {
    "window": AttentionOptions(window=7),
    "soft cap": AttentionOptions(soft_cap=1.5),
    "ALiBi": AttentionOptions(alibi_slopes=(0.5, 0.125, -0.25, 0.03125)),
    "sinks": AttentionOptions(sinks=(0.0, 2.5, -1.0, 1.0)),
    "all": AttentionOptions(
        window=18,
        soft_cap=3.0,
        alibi_slopes=(0.5, 0.125, -0.25, 0.03125),
        sinks=(0.0, 2.5, -1.0, 1.0),
    ),
}
"""For 4 query heads."""


class Stored(TypedDict, total=False):
    """How a quantised case is made: arguments of `make_case`."""

    stored: torch.dtype
    fixed_scales: tuple[float, float]


STORED: list[Stored] = [
    {"stored": torch.float8_e4m3fn},
    {"stored": torch.int8},
    {"stored": torch.float8_e4m3fn, "fixed_scales": (0.01, 0.02)},
    {"stored": torch.int8, "fixed_scales": (0.03, 0.04)},
]


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Arguments of prefill and decode, K/V in place, and the block tables they came from."""

    q: torch.Tensor
    cache: KVCache
    batch: AttentionBatch
    options: AttentionOptions
    tables: list[npt.NDArray[np.int32]]

    @property
    def block_size(self) -> int:
        return self.cache.keys.shape[2]

    def exact(self) -> torch.Tensor:
        """`[T, Hq, D] float64`."""
        return attention(self.q, self.cache, self.batch, self.options)

    def with_caches(self, keys: torch.Tensor, values: torch.Tensor) -> PagedCase:
        return replace(self, cache=KVCache(keys, values))


def make_case(
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    poison: float = float("nan"),
    scale: float | None = None,
    options: AttentionOptions | None = None,
    stored: torch.dtype | None = None,
    fixed_scales: tuple[float, float] | None = None,
    seed: int = 0,
) -> PagedCase:
    """Sequences with `contexts` tokens before their `queries` new ones, blocks in random order.

    The caches are layer 1 of a pool `[N, L, 2, Hkv, B, D]`. stored: float8_e4m3fn or int8, for a
    quantised one, with a scale for each token and head or the `fixed_scales` of K and V.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [-(-(c + n) // block_size) for c, n in zip(contexts, queries, strict=True)]
    num_blocks = sum(sizes) + SPARE_BLOCKS
    order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    tables = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]) if sizes else []
    shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    if stored is None:
        pool = torch.full(shape, poison, dtype=dtype)
    else:
        pool = torch.full(shape, 0x7F, dtype=torch.uint8).view(stored)  # NaN, or 127
    scales = None if stored is None else _poisoned_scales(shape[:5], poison, fixed_scales)
    cache = KVCache(pool[:, 1, 0], pool[:, 1, 1], scales)

    zeros = [0] * len(tables)
    lengths = [c + n for c, n in zip(contexts, queries, strict=True)]
    everything = make_batch(tables, zeros, lengths, zeros, block_size)
    kv_shape = (sum(lengths), num_kv_heads, head_dim)
    k = torch.randn(kv_shape, generator=generator).to(dtype)
    v = torch.randn(kv_shape, generator=generator).to(dtype)
    write_kv(cache, k, v, everything.slot_mapping)

    q = torch.randn((sum(queries), num_kv_heads * group, head_dim), generator=generator)
    return PagedCase(
        q=q.to(dtype),
        cache=cache,
        batch=make_batch(tables, contexts, queries, zeros, block_size),
        options=options or AttentionOptions(scale=scale),
        tables=tables,
    )


def make_latent_case(
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    num_query_heads: int = 4,
    latent_dim: int = 32,
    rope_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    poison: float = float("nan"),
    scale: float | None = None,
    options: AttentionOptions | None = None,
    seed: int = 0,
) -> PagedCase:
    """`make_case` over latents: one KV head of `latent_dim + rope_dim`, V its first part.

    Without a scale, also in the options, it is the one of heads of half the latent's elements.
    """
    if scale is None:
        scale = (latent_dim // 2 + rope_dim) ** -0.5
    if options is None or options.scale is None:
        options = replace(options or AttentionOptions(), scale=scale)
    case = make_case(
        contexts,
        queries,
        num_kv_heads=1,
        group=num_query_heads,
        head_dim=latent_dim + rope_dim,
        block_size=block_size,
        dtype=dtype,
        poison=poison,
        options=options,
        seed=seed,
    )
    keys = case.cache.keys
    return replace(case, cache=KVCache(keys, keys[..., :latent_dim], is_latent=True))


def _poisoned_scales(
    shape: Sequence[int], poison: float, fixed: tuple[float, float] | None
) -> KVScales:
    """shape: `(N, L, 2, Hkv, B)`."""
    if fixed is None:
        numbers = torch.full(shape, poison)
    else:
        numbers = torch.full((*shape[:3], 1, 1), poison).expand(shape)
    return KVScales(numbers[:, 1, 0], numbers[:, 1, 1], fixed)
