import numpy as np
import pytest
import torch

from prefixcache.attention.reference import write_kv as reference
from prefixcache.attention.write_kv import write_kv
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache, KVScales
from tests.attention.paged_cases import DTYPES

N, HKV, B, D = 6, 2, 4, 8


def fresh_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    pool = torch.arange(N * 3 * 2 * HKV * B * D).remainder(100).to(dtype)
    pool = pool.view(N, 3, 2, HKV, B, D)
    return KVCache(pool[:, 1, 0], pool[:, 1, 1])


def new_tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    k = torch.randn(count, HKV, D, generator=generator).to(dtype)
    v = torch.randn(count, HKV, D, generator=generator).to(dtype)
    return k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[5], [0, 23, 7, 8], [-1, 3, -1, 20, 4], [-1, -1], []])
def test_exactly_the_named_slots_change(slots: list[int], dtype: torch.dtype) -> None:
    slot_mapping = np.array(slots, dtype=np.int64)
    k, v = new_tokens(len(slots), dtype)
    actual, expected = fresh_cache(dtype), fresh_cache(dtype)
    write_kv(actual, k, v, slot_mapping)
    reference.write_kv(expected, k, v, slot_mapping)
    # The views' whole storage: other layers and K against V too.
    assert torch.equal(actual.keys._base, expected.keys._base)


def test_many_tokens_of_any_strides_are_written_by_several_threads(num_threads: int) -> None:
    """K is a view with heads first, V every second token, and both more than one thread's work."""
    num_tokens, num_heads, size = 3000, 3, 40
    k = torch.randn(num_heads, num_tokens, size, generator=torch.Generator().manual_seed(1))
    v = torch.randn(2 * num_tokens, num_heads, size, generator=torch.Generator().manual_seed(2))
    slot_mapping = np.random.default_rng(3).permutation(4 * num_tokens)[:num_tokens]
    slot_mapping[::7] = -1
    pool = torch.zeros(2, 4 * num_tokens // 4, 4, num_heads, size)
    expected = torch.zeros_like(pool)
    for memory, write in ((pool, write_kv), (expected, reference.write_kv)):
        cache = KVCache(memory[0].transpose(1, 2), memory[1].transpose(1, 2))
        write(cache, k.transpose(0, 1), v[::2], slot_mapping)
    assert torch.equal(pool, expected)


def test_a_slot_mapping_may_have_any_strides() -> None:
    actual, expected = fresh_cache(), fresh_cache()
    slot_mapping = np.array([5, 9, 0, 9, 23, 9], dtype=np.int64)[::2]
    write_kv(actual, *new_tokens(3), slot_mapping)
    reference.write_kv(expected, *new_tokens(3), slot_mapping)
    assert torch.equal(actual.keys._base, expected.keys._base)


QUANTIZED = [torch.float8_e4m3fn, torch.int8]
FIXED = (0.02, 0.015)
# Heads whose largest magnitude is unusual: each in a token of its own, beside an ordinary head.
UNUSUAL = {
    "zeros": [0.0] * D,
    "negative zeros": [-0.0] * D,
    "a NaN": [1.0, torch.nan, *[2.0] * (D - 2)],
    "all NaN": [torch.nan] * D,
    "an infinity": [1.0, -torch.inf, *[2.0] * (D - 2)],
    "an infinity and a NaN": [torch.inf, torch.nan, *[2.0] * (D - 2)],
    "subnormal": [2.0**-140, *[-(2.0**-145)] * (D - 1)],
    "just above the smallest scale": [2.0**-117, *[2.0**-120] * (D - 1)],
    "the largest float32": [3.4028235e38, *[1e38] * (D - 1)],
    "ties": [127.0, 0.5, 1.5, -2.5, 3.5, 62.5, -126.5, 0.49999997],
}


def quantized_cache(dtype: torch.dtype, granularity: str) -> KVCache:
    """Every byte is 0x55 and every scale 7, so that whatever is written shows."""
    stored = torch.full((N, 3, 2, HKV, B, D), 0x55, dtype=torch.uint8).view(dtype)
    if granularity == "a scale a head":
        scales, fixed = torch.full((N, 3, 2, HKV, B), 7.0), None
    else:
        scales, fixed = torch.full((N, 3, 2, 1, 1), 7.0).expand(N, 3, 2, HKV, B), FIXED
    views = KVScales(scales[:, 1, 0], scales[:, 1, 1], fixed)
    return KVCache(stored[:, 1, 0], stored[:, 1, 1], views)


def assert_same_bits(actual: KVCache, expected: KVCache) -> None:
    """The whole storage behind the views, NaN equal to itself."""
    for one, other in ((actual.keys, expected.keys), (actual.scales.keys, expected.scales.keys)):
        bits, expected_bits = one._base.contiguous(), other._base.contiguous()
        assert torch.equal(bits.view(torch.uint8), expected_bits.view(torch.uint8))


@pytest.mark.parametrize("granularity", ["a scale a head", "fixed"])
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[5], [0, 23, 7, 8], [-1, 3, -1, 20, 4], [-1, -1], []])
def test_quantised_slots_and_their_scales_equal_the_reference_bit_for_bit(
    slots: list[int], dtype: torch.dtype, stored: torch.dtype, granularity: str
) -> None:
    slot_mapping = np.array(slots, dtype=np.int64)
    k, v = new_tokens(len(slots), dtype)
    actual, expected = quantized_cache(stored, granularity), quantized_cache(stored, granularity)
    write_kv(actual, k, v, slot_mapping)
    reference.write_kv(expected, k, v, slot_mapping)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("granularity", ["a scale a head", "fixed"])
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unusual_heads_are_quantised_like_the_reference(
    dtype: torch.dtype, stored: torch.dtype, granularity: str
) -> None:
    k, v = new_tokens(len(UNUSUAL), dtype)
    for token, numbers in enumerate(UNUSUAL.values()):
        k[token, 0] = v[token, 1] = torch.tensor(numbers).to(dtype)
    slot_mapping = np.arange(len(UNUSUAL), dtype=np.int64)
    actual, expected = quantized_cache(stored, granularity), quantized_cache(stored, granularity)
    write_kv(actual, k, v, slot_mapping)
    reference.write_kv(expected, k, v, slot_mapping)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_head_with_a_nan_reads_as_nan_and_its_neighbour_as_itself(stored: torch.dtype) -> None:
    k, v = new_tokens(1)
    k[0, 0, 3] = torch.nan
    cache = quantized_cache(stored, "a scale a head")
    write_kv(cache, k, v, np.array([6]))
    read = cache.keys[1, :, 2].float() * cache.scales.keys[1, :, 2, None]
    assert torch.isnan(read[0]).all()
    torch.testing.assert_close(read[1], k[0, 1], rtol=2**-4, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_written_once_as_keys(dtype: torch.dtype) -> None:
    pool = torch.zeros(N, 1, B, D, dtype=dtype)
    cache = KVCache(pool, pool[..., : D - 2], is_latent=True)
    k = new_tokens(2, dtype)[0][:, :1]
    write_kv(cache, k, None, np.array([9, 2]))
    expected = torch.zeros_like(pool)
    expected[2, 0, 1], expected[0, 0, 2] = k[0, 0], k[1, 0]
    assert torch.equal(pool, expected)


def views() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tokens_first = torch.zeros(2, N, B, HKV, D)
    pairs = torch.zeros(N, 2, B, HKV, D)
    spread = torch.zeros(2, N, HKV, B, 2 * D)
    return {
        "tokens first": (tokens_first[0].transpose(1, 2), tokens_first[1].transpose(1, 2)),
        "K and V of a block together": (
            pairs[:, 0].transpose(1, 2),
            pairs[:, 1].transpose(1, 2),
        ),
        "elements apart": (spread[0, ..., ::2], spread[1, ..., ::2]),
        "K and V differ": (
            torch.zeros(N, D, B, HKV).transpose(1, 3),
            pairs.new_zeros(N, 2, HKV, B, D)[:, 1],
        ),
    }


@pytest.mark.parametrize("name", list(views()))
def test_a_cache_may_have_any_strides(name: str) -> None:
    cache = KVCache(*views()[name])
    expected = KVCache(torch.zeros(N, HKV, B, D), torch.zeros(N, HKV, B, D))
    slot_mapping = np.array([9, -1, 0, 22], dtype=np.int64)
    k, v = new_tokens(4)
    write_kv(cache, k, v, slot_mapping)
    reference.write_kv(expected, k, v, slot_mapping)
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.values, expected.values)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("slot_mapping", {"slot_mapping": np.array([0, N * B])}),
        ("slot_mapping", {"slot_mapping": np.array([-2, 0])}),
        ("slot_mapping", {"slot_mapping": np.array([0, 1], dtype=np.int32)}),
        ("k", {"slot_mapping": np.array([0, 1, 2])}),
        ("k", {"k": torch.zeros(2, HKV, D, dtype=torch.bfloat16)}),
        ("k", {"k": torch.zeros(2, HKV + 1, D)}),
        ("v", {"v": torch.zeros(2, HKV, D, dtype=torch.float16)}),
        ("v", {"v": torch.zeros(2, HKV, D + 1)}),
        ("v", {"v": torch.zeros(2, HKV, D, device="meta")}),
        ("keys", {"keys": torch.zeros(N, HKV, B)}),
        ("keys", {"keys": torch.zeros(N, HKV, B, D, dtype=torch.float64)}),
        ("values", {"values": torch.zeros(N, HKV, B, D + 1)}),
        ("values", {"values": torch.zeros(N, HKV, B, D, dtype=torch.float16)}),
    ],
)
def test_a_refusal_names_the_argument_and_writes_nothing(
    field: str, change: dict[str, torch.Tensor]
) -> None:
    cache = fresh_cache()
    k, v = new_tokens(2)
    arguments = {
        "keys": cache.keys,
        "values": cache.values,
        "k": k,
        "v": v,
        "slot_mapping": np.array([0, 1]),
    } | change
    changed = KVCache(arguments.pop("keys"), arguments.pop("values"))
    with pytest.raises(InvalidArgumentError) as refusal:
        write_kv(changed, **arguments)
    assert refusal.value.field == field
    assert torch.equal(cache.keys._base, fresh_cache().keys._base)
