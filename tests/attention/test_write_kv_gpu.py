"""The compiled `write_kv` and its float8 on a device, bit by bit: `make gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixcache.attention.reference import write_kv as reference
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache, KVScales
from tests.attention import float8_cases
from tests.attention.on_device import DEVICE, cache_on_device
from tests.attention.paged_cases import DTYPES
from tests.attention.test_write_kv import (
    HKV,
    QUANTIZED,
    UNUSUAL,
    B,
    D,
    N,
    fresh_cache,
    new_tokens,
    quantized_cache,
)

pytestmark = pytest.mark.gpu
SLOTS = np.array([0, 23, -1, 7, 8, -1, 3, 11, 2, 20], dtype=np.int64)
GRANULARITIES = ["a scale a head", "fixed"]


def assert_same(actual: KVCache, expected: KVCache) -> None:
    """The whole memory behind the views; any NaN equals any other."""
    pairs = [(actual.keys, expected.keys), (actual.values, expected.values)]
    if expected.scales is not None:
        pairs += [
            (actual.scales.keys, expected.scales.keys),
            (actual.scales.values, expected.scales.values),
        ]
    for one, other in pairs:
        one, other = one._base.cpu().view(one.dtype), other._base.view(other.dtype)
        nan = other.float().isnan()
        assert torch.equal(one.float().isnan(), nan)
        assert torch.equal(one.float()[~nan], other.float()[~nan])
        assert torch.equal(one.float()[~nan].signbit(), other.float()[~nan].signbit())


def check(cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, slots: np.ndarray) -> None:
    there = cache_on_device(cache)
    write_kv(there, k.to(DEVICE), None if v is None else v.to(DEVICE), slots)
    reference.write_kv(cache, k, v, slots)
    assert_same(there, cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_named_slots_change(dtype: torch.dtype) -> None:
    check(fresh_cache(dtype), *new_tokens(len(SLOTS), dtype), SLOTS)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("float8_way")
def test_quantised_slots_and_their_scales_equal_the_reference(
    dtype: torch.dtype, stored: torch.dtype, granularity: str
) -> None:
    check(quantized_cache(stored, granularity), *new_tokens(len(SLOTS), dtype), SLOTS)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("float8_way")
def test_unusual_heads_are_quantised_like_the_reference(
    dtype: torch.dtype, stored: torch.dtype, granularity: str
) -> None:
    """NaN, infinities, zeros, subnormal numbers, ties."""
    k, v = new_tokens(len(UNUSUAL), dtype)
    for token, numbers in enumerate(UNUSUAL.values()):
        k[token, 0] = v[token, 1] = torch.tensor(numbers).to(dtype)
    check(quantized_cache(stored, granularity), k, v, np.arange(len(UNUSUAL), dtype=np.int64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_written_once_as_keys(dtype: torch.dtype) -> None:
    pool = torch.zeros(N, 1, 2, B, D, dtype=dtype)[:, :, 0]
    k, _ = new_tokens(len(SLOTS), dtype)
    check(KVCache(pool, pool[..., : D - 2], is_latent=True), k[:, :1], None, SLOTS)


def test_float8_by_hand_is_exact() -> None:
    decoded = float8_cases.decoded(float8_cases.PATTERNS.to(DEVICE)).cpu()
    expected = float8_cases.PATTERNS.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    for numbers in (float8_cases.every_float16(), float8_cases.around_every_rounding()):
        patterns = float8_cases.encoded(numbers.to(DEVICE)).cpu()
        rest = ~numbers.isnan()
        expected = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(patterns[rest], expected[rest])
        assert patterns[~rest].view(torch.float8_e4m3fn).float().isnan().all()


@pytest.mark.usefixtures("float8_way")
def test_every_rounding_of_float8_is_torchs() -> None:
    """Under a scale of 1 the kernel does nothing but convert."""
    numbers = float8_cases.around_every_rounding().view(-1, 1, 64)
    slots = np.arange(len(numbers), dtype=np.int64)
    pool = torch.zeros(len(numbers), 2, 1, 1, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(len(numbers), 2, 1, 1)
    cache = KVCache(pool[:, 0], pool[:, 1], KVScales(scales[:, 0], scales[:, 1], (1.0, 1.0)))
    there = cache_on_device(cache)
    write_kv(there, numbers.to(DEVICE), numbers.to(DEVICE), slots)
    expected = numbers[:, 0].to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(there.keys.cpu()[:, 0, 0].view(torch.uint8), expected)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_slots_beyond_4_gib_are_written(stored: torch.dtype | None) -> None:
    """K and V of a block stand together: the last block's lie past 2**32 elements."""
    shape = (HKV, 16, 128)
    num_blocks = 2**32 // (2 * HKV * 16 * 128) + 1
    pool = torch.empty(num_blocks, 2, *shape, dtype=stored or torch.bfloat16, device=DEVICE)
    scales = None
    if stored is not None:
        numbers = torch.zeros(num_blocks, 2, *shape[:2], device=DEVICE)
        scales = KVScales(numbers[:, 0], numbers[:, 1])
    k, v = torch.randn(2, 3, HKV, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    last = num_blocks * 16 - 1
    slots = np.array([last, last - 1, last - 2], dtype=np.int64)
    write_kv(KVCache(pool[:, 0], pool[:, 1], scales), k.to(DEVICE), v.to(DEVICE), slots)
    for part, new in enumerate((k, v)):
        written = pool[-1, part, :, [15, 14, 13]].cpu().float()
        if scales is not None:
            written = written * (scales.keys, scales.values)[part][-1, :, [15, 14, 13], None].cpu()
        tolerance = 0.0 if stored is None else 0.1
        torch.testing.assert_close(
            written.transpose(0, 1), new.float(), rtol=tolerance, atol=tolerance
        )
