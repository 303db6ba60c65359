"""Attention over latents is attention over what they decompress to, and is answered as such."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.reference.attention import attention
from prefixcache.attention.reference.mla import (
    UpProjections,
    absorb,
    decompressed_attention,
    project_values,
)
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import DTYPES, make_latent_case
from tests.support.tolerances import assert_close


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer of a model with latents computes for some sequences; float64."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    latents: list[torch.Tensor]
    rope_keys: list[torch.Tensor]
    projections: UpProjections
    scale: float

    def decompressed(self, queries: list[int]) -> torch.Tensor:
        """The last `queries` tokens of each sequence."""
        pieces = zip(
            self.q_nope.split(queries),
            self.q_rope.split(queries),
            self.latents,
            self.rope_keys,
            strict=True,
        )
        return torch.cat(
            [decompressed_attention(*piece, self.projections, self.scale) for piece in pieces]
        )


def make_layer(
    lengths: list[int], queries: list[int], heads: int, r: int, p: int, dims: tuple[int, int]
) -> Layer:
    generator = torch.Generator().manual_seed(sum(lengths) + heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    nope_dim, value_dim = dims
    projections = UpProjections(
        random(heads, nope_dim, r) / r**0.5, random(heads, value_dim, r) / r**0.5
    )
    return Layer(
        q_nope=random(sum(queries), heads, nope_dim),
        q_rope=random(sum(queries), heads, p),
        latents=[random(length, r) for length in lengths],
        rope_keys=[random(length, p) for length in lengths],
        projections=projections,
        scale=(nope_dim + p) ** -0.5,
    )


def make_cache(layer: Layer, block_size: int) -> tuple[KVCache, list[np.ndarray]]:
    """A pool of poison with the layer's latents in it, and the block tables."""
    sizes = [-(-len(latents) // block_size) for latents in layer.latents]
    order = np.random.default_rng(0).permutation(sum(sizes) + 2).astype(np.int32)
    tables = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
    r, p = layer.latents[0].shape[1], layer.rope_keys[0].shape[1]
    keys = torch.full((sum(sizes) + 2, 1, block_size, r + p), torch.nan, dtype=torch.float64)
    for table, latents, rope_keys in zip(tables, layer.latents, layer.rope_keys, strict=True):
        for position, (latent, rope_key) in enumerate(zip(latents, rope_keys, strict=True)):
            block, offset = table[position // block_size], position % block_size
            keys[block, 0, offset] = torch.cat([latent, rope_key])
    return KVCache(keys, keys[..., :r], is_latent=True), tables


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=3),
    heads=st.integers(1, 5),
    latent_dim=st.integers(1, 12),
    rope_dim=st.integers(1, 6),
    dims=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    block_size=st.integers(1, 5),
)
def test_attention_over_latents_is_attention_over_what_they_decompress_to(
    lengths: list[tuple[int, int]],
    heads: int,
    latent_dim: int,
    rope_dim: int,
    dims: tuple[int, int],
    block_size: int,
) -> None:
    """Two float64 references, of which one knows nothing of latents, blocks or absorption."""
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    layer = make_layer([c + n for c, n in lengths], queries, heads, latent_dim, rope_dim, dims)
    cache, tables = make_cache(layer, block_size)
    batch = make_batch(tables, contexts, queries, [0] * len(lengths), block_size)
    q = absorb(layer.q_nope, layer.q_rope, layer.projections)
    out = attention(q, cache, batch, AttentionOptions(scale=layer.scale))
    assert out.shape == (sum(queries), heads, latent_dim)
    torch.testing.assert_close(
        project_values(out, layer.projections), layer.decompressed(queries), rtol=1e-9, atol=1e-12
    )


def written_cache(layer: Layer) -> tuple[KVCache, AttentionBatch]:
    """One sequence's latents in float32, through `write_kv`."""
    (latents,), (rope_keys,) = layer.latents, layer.rope_keys
    keys = torch.full((4, 1, 16, latents.shape[1] + rope_keys.shape[1]), torch.nan)
    cache = KVCache(keys, keys[..., : latents.shape[1]], is_latent=True)
    n, queries = len(latents), len(layer.q_nope)
    tables = [np.array([3, 0, 2], dtype=np.int32)]
    new = torch.cat([latents, rope_keys], dim=1)[:, None].float()
    write_kv(cache, new, None, make_batch(tables, [0], [n], [0], 16).slot_mapping)
    return cache, make_batch(tables, [n - queries], [queries], [0], 16)


@pytest.mark.parametrize("launch", [prefill, decode])
@pytest.mark.parametrize("queries", [1, 3, 41])
def test_a_layer_through_write_and_attention_gives_what_the_model_defines(
    launch, queries: int
) -> None:
    """A layer of DeepSeek-V2-Lite with fewer heads, in float32 from end to end."""
    layer = make_layer([41], [queries], heads=3, r=512, p=64, dims=(128, 128))
    cache, batch = written_cache(layer)
    q = absorb(layer.q_nope, layer.q_rope, layer.projections).float()
    out = launch(q, cache, batch, AttentionOptions(scale=layer.scale))
    assert_close(project_values(out, layer.projections).float(), layer.decompressed([queries]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=4),
    num_query_heads=st.sampled_from([1, 3, 8]),
    latent_dim=st.sampled_from([8, 20, 32]),
    rope_dim=st.sampled_from([0, 4, 16]),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_batch_on_cpu_equals_float64_with_nan_in_every_unused_slot(
    lengths: list[tuple[int, int]], **arguments: object
) -> None:
    case = make_latent_case([c for c, _ in lengths], [n for _, n in lengths], **arguments)
    exact = case.exact()
    for launch in (prefill, decode):
        assert_close(launch(case.q, case.cache, case.batch, case.options), exact)
