import numpy as np
import pytest
import torch

from prefixcache.attention.reference import write_kv as reference
from prefixcache.attention.write_kv import write_kv
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache
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
