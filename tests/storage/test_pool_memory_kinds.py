"""Views of quantised and latent pools: where each number of a block stands in its span."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.attention.reference.write_kv import quantize
from prefixcache.attention.write_kv import write_kv
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization
from prefixcache.storage.pool_memory import PoolMemory

NUM_BLOCKS = 5
SHAPES = [(3, 2, 8, 4), (1, 1, 1, 1), (2, 3, 5, 7), (2, 1, 20, 16)]
"""Layers, KV heads, head dim, block size."""
STORED = {"float8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LATENT = LatentLayout(num_layers=3, latent_dim=12, rope_dim=4, block_size=4, dtype="float16")


def quantised(
    shape: tuple[int, int, int, int], stored: str, granularity: str = "token_head"
) -> KVLayout:
    return KVLayout(*shape, "bfloat16", Quantization(stored, granularity))


def fixed_for(layout: Layout) -> FixedScales | None:
    if layout.quantization is None or layout.quantization.scales == "token_head":
        return None
    keys = tuple(0.5 + layer for layer in range(layout.num_layers))
    return FixedScales(keys, tuple(key / 8 for key in keys))


@contextmanager
def opened(layout: Layout) -> Iterator[PoolMemory]:
    pool = PoolMemory(layout, NUM_BLOCKS, fixed_scales=fixed_for(layout))
    yield pool
    pool.close()


def write_everywhere(pool: PoolMemory) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fill every slot of every layer; returns the k and v of each, `[N * B, Hkv, D]`."""
    layout, generator = pool.layout, torch.Generator().manual_seed(0)
    num_slots = NUM_BLOCKS * layout.block_size
    written = []
    for layer in range(layout.num_layers):
        k, v = torch.randn(2, num_slots, layout.num_kv_heads, layout.head_dim, generator=generator)
        cache = pool.layer(layer)
        slots = np.arange(num_slots, dtype=np.int64)
        if cache.is_latent:
            write_kv(cache, k.to(pool.dtype), None, slots)
        else:
            write_kv(cache, k.to(pool.dtype), v.to(pool.dtype), slots)
        written.append((k.to(pool.dtype), v.to(pool.dtype)))
    return written


@pytest.mark.parametrize("granularity", ["token_head", "tensor"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantised_block_is_its_numbers_and_then_its_scales(
    shape: tuple[int, int, int, int], stored: str, granularity: str
) -> None:
    layout = quantised(shape, stored, granularity)
    num_layers, num_kv_heads, head_dim, block_size = shape
    fixed = fixed_for(layout)
    with opened(layout) as pool:
        written = write_everywhere(pool)
        for block in range(NUM_BLOCKS):
            span = pool.block_span(block)
            num_elements = num_layers * 2 * num_kv_heads * block_size * head_dim
            numbers = span[:num_elements].view(STORED[stored])
            numbers = numbers.view(num_layers, 2, num_kv_heads, block_size, head_dim)
            scales = span[-(-num_elements // 16) * 16 :].view(torch.float32)
            for layer, tensors in enumerate(written):
                for part, heads in enumerate(tensors):
                    pair = None if fixed is None else (fixed.keys[layer], fixed.values[layer])
                    for offset in range(block_size):
                        expected, expected_scales = quantize(
                            heads[block * block_size + offset],
                            STORED[stored],
                            None if pair is None else pair[part],
                        )
                        actual = numbers[layer, part, :, offset]
                        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
                        if pair is None:
                            whole = scales[: num_elements // head_dim]
                            whole = whole.view(num_layers, 2, num_kv_heads, block_size)
                            assert torch.equal(whole[layer, part, :, offset], expected_scales)
                        else:
                            assert scales[2 * layer + part] == pair[part]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_a_tensor_is_one_number_seen_by_every_head_and_token(
    shape: tuple[int, int, int, int],
) -> None:
    layout = quantised(shape, "int8", "tensor")
    with opened(layout) as pool:
        for layer in range(layout.num_layers):
            scales = pool.layer(layer).scales
            assert scales is not None
            assert scales.fixed == (0.5 + layer, (0.5 + layer) / 8)
            for view in (scales.keys, scales.values):
                assert view.shape == (NUM_BLOCKS, layout.num_kv_heads, layout.block_size)
                assert view.stride() == (layout.block_bytes // 4, 0, 0)


@pytest.mark.parametrize("granularity", ["token_head", "tensor"])
def test_a_fresh_pool_has_no_scales_yet(granularity: str) -> None:
    with opened(quantised(SHAPES[0], "float8_e4m3", granularity)) as pool:
        assert pool.dtype == torch.bfloat16
        assert not pool.spans.any()
        scales = pool.layer(1).scales
        assert scales is not None and not scales.keys.any() and not scales.values.any()
        if granularity == "token_head":
            assert scales.fixed is None


def test_a_latent_block_is_one_head_whose_values_are_its_first_elements() -> None:
    with opened(LATENT) as pool:
        written = write_everywhere(pool)
        for layer, (latents, _) in enumerate(written):
            cache = pool.layer(layer)
            assert cache.is_latent and cache.scales is None
            assert cache.keys.shape == (NUM_BLOCKS, 1, 4, 16)
            assert cache.values.shape == (NUM_BLOCKS, 1, 4, 12)
            assert torch.equal(cache.values, cache.keys[..., :12])
            for block in range(NUM_BLOCKS):
                span = pool.block_span(block).view(torch.float16).view(3, 4, 16)
                assert torch.equal(span[layer], latents[block * 4 : block * 4 + 4, 0])


@pytest.mark.parametrize(
    "layout",
    [
        LATENT,
        *(
            quantised(shape, stored, granularity)
            for shape in SHAPES
            for stored in STORED
            for granularity in ("token_head", "tensor")
        ),
    ],
    ids=str,
)
def test_a_copied_block_takes_its_scales_along(layout: Layout) -> None:
    with opened(layout) as pool:
        write_everywhere(pool)
        for layer in range(layout.num_layers):
            scales = pool.layer(layer).scales
            if scales is not None:
                # Unlike those of any other block. One number may be seen by all heads and tokens.
                scales.keys[3, :1, :1] = scales.values[3, :1, :1] = 7.0
        before = pool.spans.clone()
        copy_blocks(pool.spans, [3], pool.spans, [1])
        assert torch.equal(pool.spans, before[[0, 3, 2, 3, 4]])
        for layer in range(layout.num_layers):
            cache = pool.layer(layer)
            assert torch.equal(cache.keys[1].view(torch.uint8), cache.keys[3].view(torch.uint8))
            if cache.scales is not None:
                for scales in (cache.scales.keys, cache.scales.values):
                    assert scales[1, 0, 0] == 7.0
                    assert torch.equal(scales[1], scales[3])


@pytest.mark.parametrize(
    ("layout", "fixed"),
    [
        (quantised(SHAPES[0], "int8", "tensor"), None),
        (quantised(SHAPES[0], "int8", "tensor"), FixedScales.ones(2)),
        (quantised(SHAPES[0], "int8"), FixedScales.ones(3)),
        (KVLayout(*SHAPES[0], "bfloat16"), FixedScales.ones(3)),
        (LATENT, FixedScales.ones(3)),
    ],
)
def test_fixed_scales_that_do_not_fit_the_layout_are_refused(
    layout: Layout, fixed: FixedScales | None
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        PoolMemory(layout, NUM_BLOCKS, fixed_scales=fixed)
    assert refusal.value.field == "fixed_scales"
