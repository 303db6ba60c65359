"""The contract of quantised `write_kv` once more, for its kernel, with float8 in both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.attention.reference import write_kv as reference
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache, KVScales
from tests.attention.paged_cases import DTYPES
from tests.attention.test_write_kv import (
    QUANTIZED,
    test_a_head_with_a_nan_reads_as_nan_and_its_neighbour_as_itself,
    test_quantised_slots_and_their_scales_equal_the_reference_bit_for_bit,
    test_unusual_heads_are_quantised_like_the_reference,
)

__all__ = [
    "test_a_head_with_a_nan_reads_as_nan_and_its_neighbour_as_itself",
    "test_quantised_slots_and_their_scales_equal_the_reference_bit_for_bit",
    "test_unusual_heads_are_quantised_like_the_reference",
]

pytestmark = [
    pytest.mark.usefixtures("float8_way"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


def quantized_pool(stored: torch.dtype, *shape: int, fixed: tuple[float, float] | None) -> KVCache:
    """shape: `N, Hkv, B, D`. Every byte 0x55, every scale NaN; K and V in memory of their own."""
    keys, values = torch.full((2, *shape), 0x55, dtype=torch.uint8).view(stored)
    if fixed is None:
        scales = torch.full((2, *shape[:3]), torch.nan)
    else:
        scales = torch.full((2, shape[0], 1, 1), torch.nan).expand(2, *shape[:3])
    return KVCache(keys, values, KVScales(scales[0], scales[1], fixed))


def assert_equal(actual: KVCache, expected: KVCache) -> None:
    for name in ("keys", "values"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        one, other = getattr(actual.scales, name), getattr(expected.scales, name)
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from(QUANTIZED),
    fixed=st.sampled_from([None, (0.01, 0.003)]),
    head_dim=st.sampled_from([1, 3, 16, 64, 80, 96, 128, 256]),
    num_heads=st.integers(1, 5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    num_tokens=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
def test_any_shape_equals_the_reference_and_touches_nothing_else(
    dtype: torch.dtype,
    stored: torch.dtype,
    fixed: tuple[float, float] | None,
    head_dim: int,
    num_heads: int,
    block_size: int,
    num_tokens: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    num_blocks = num_tokens // block_size + 2
    slot_mapping = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int64)
    slot_mapping[rng.random(num_tokens) < 0.2] = -1
    generator = torch.Generator().manual_seed(seed)
    # K and V as an engine has them: views of one projection's output; heads of all sizes.
    kv = torch.randn(num_tokens, 2, num_heads, head_dim, generator=generator)
    kv *= 2.0 ** torch.randint(-12, 6, (num_tokens, 2, num_heads, 1), generator=generator)
    k, v = kv.to(dtype).unbind(1)
    caches = []
    for launch in (write_kv, reference.write_kv):
        caches.append(
            quantized_pool(stored, num_blocks, num_heads, block_size, head_dim, fixed=fixed)
        )
        launch(caches[-1], k, v, slot_mapping)
    assert_equal(*caches)


@pytest.mark.parametrize("stored", QUANTIZED)
def test_caches_and_scales_may_have_any_strides(stored: torch.dtype) -> None:
    """K, V and both scales at distances of their own, elements of K apart."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 5, 2, 8, generator=generator)
    slot_mapping = np.array([11, 0, -1, 3, 6], dtype=np.int64)
    expected = quantized_pool(stored, 3, 2, 4, 8, fixed=None)
    keys = torch.full((3, 4, 2, 16), 0x55, dtype=torch.uint8).view(stored)
    values = torch.full((2, 3, 5, 8), 0x55, dtype=torch.uint8).view(stored)
    key_scales, value_scales = torch.full((3, 4, 3), torch.nan), torch.full((4, 2, 3), torch.nan)
    actual = KVCache(
        keys.transpose(1, 2)[..., ::2],
        values.transpose(0, 1)[:, :, :4],
        KVScales(key_scales[:, :, :2].transpose(1, 2), value_scales.permute(2, 1, 0)),
    )
    write_kv(actual, k, v, slot_mapping)
    reference.write_kv(expected, k, v, slot_mapping)
    assert_equal(actual, expected)
