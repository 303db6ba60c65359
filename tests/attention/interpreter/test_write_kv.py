"""The contract of `write_kv` once more, for its kernel, and the shapes that only a kernel minds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.attention.reference import write_kv as reference
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache
from tests.attention import test_large_pools as large_pools
from tests.attention.paged_cases import DTYPES
from tests.attention.test_write_kv import (
    test_a_cache_may_have_any_strides,
    test_a_refusal_names_the_argument_and_writes_nothing,
    test_exactly_the_named_slots_change,
    test_latents_are_written_once_as_keys,
)

__all__ = [
    "test_a_cache_may_have_any_strides",
    "test_a_refusal_names_the_argument_and_writes_nothing",
    "test_exactly_the_named_slots_change",
    "test_latents_are_written_once_as_keys",
]


def poisoned_pool(
    num_blocks: int, num_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """`[N, L, 2, Hkv, B, D]`, all NaN."""
    shape = (num_blocks, 2, 2, num_heads, block_size, head_dim)
    return torch.full(shape, torch.nan, dtype=dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([1, 3, 16, 64, 80, 96, 128, 256]),
    num_heads=st.integers(1, 5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    num_tokens=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_equals_the_reference_and_touches_nothing_else(
    dtype: torch.dtype,
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
    # K and V as an engine has them: views of one projection's output.
    kv = torch.randn(num_tokens, 2, num_heads, head_dim, generator=generator).to(dtype)
    actual = poisoned_pool(num_blocks, num_heads, block_size, head_dim, dtype)
    expected = actual.clone()
    for launch, pool in ((write_kv, actual), (reference.write_kv, expected)):
        launch(KVCache(pool[:, 1, 0], pool[:, 1, 1]), kv[:, 0], kv[:, 1], slot_mapping)
    assert torch.equal(bits(actual), bits(expected))


def test_new_tokens_may_have_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(8, 2, 5, generator=generator).permute(2, 1, 0)
    v = torch.randn(2, 5, 16, generator=generator).transpose(0, 1)[..., ::2]
    pool = poisoned_pool(3, 2, 4, 8, torch.float32)
    slot_mapping = np.array([11, 0, -1, 3, 6], dtype=np.int64)
    expected = pool.clone()
    for launch, target in ((write_kv, pool), (reference.write_kv, expected)):
        launch(KVCache(target[:, 0, 0], target[:, 0, 1]), k, v, slot_mapping)
    assert torch.equal(bits(pool), bits(expected))


def test_special_values_are_moved_bit_by_bit() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    k = patterns.view(torch.bfloat16).view(256, 2, 128)
    pool = torch.zeros(16, 2, 2, 16, 128, dtype=torch.bfloat16)
    write_kv(KVCache(pool[:, 0], pool[:, 1]), k, k, np.arange(256))
    stored = pool[:, 0].transpose(1, 2).reshape(256, 2, 128)
    assert torch.equal(bits(stored), bits(k))


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33])
def test_the_last_program_may_be_partly_or_exactly_full(num_tokens: int) -> None:
    """With 2 heads of 32 elements a program takes 32 tokens."""
    k, v = torch.randn(2, num_tokens, 2, 32, generator=torch.Generator().manual_seed(1))
    pool = poisoned_pool(5, 2, 8, 32, torch.float32)
    expected = pool.clone()
    for launch, target in ((write_kv, pool), (reference.write_kv, expected)):
        launch(KVCache(target[:, 0, 0], target[:, 0, 1]), k, v, np.arange(num_tokens))
    assert torch.equal(bits(pool), bits(expected))


@pytest.mark.parametrize("heads_first", [True, False])
def test_the_highest_slots_of_a_large_pool_are_reached(heads_first: bool) -> None:
    """No slot times stride is cut to 32 bits."""
    num_blocks = large_pools.NUM_BLOCKS
    cache = large_pools.caches(large_pools.sparse_pool(), heads_first)
    _, num_heads, block_size, head_dim = cache.keys.shape
    k, v = torch.randn(2, 3, num_heads, head_dim).bfloat16()
    last = num_blocks * block_size - 1
    write_kv(cache, k, v, np.array([last, 0, last - 2 * block_size]))
    for view, new in ((cache.keys, k), (cache.values, v)):
        stored = view[[num_blocks - 1, 0, num_blocks - 3], :, [block_size - 1, 0, block_size - 1]]
        assert torch.equal(stored, new)
