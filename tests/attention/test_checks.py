from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.errors import InvalidArgumentError
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import make_case

# Two sequences of 5 and 6 tokens, 2 + 1 of them new, in blocks of 4: 2 blocks each of a pool of 7.
CASE = make_case([3, 5], [2, 1])
OUTSIDE = len(CASE.cache.keys)


def int32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


BAD_BATCHES = [
    ("block_tables", {"block_tables": int32([[0, OUTSIDE], [1, 2]])}),
    ("block_tables", {"block_tables": int32([[0, -1], [1, 2]])}),
    ("block_tables", {"block_tables": int32([[0], [1]])}),
    ("block_tables", {"block_tables": int32([[0, 1]])}),
    ("block_tables", {"block_tables": int32([0, 1])}),
    ("block_tables", {"block_tables": np.array([[0, 3], [1, 2]])}),
    ("query_start", {"query_start": int32([0, 2, 4])}),
    ("query_start", {"query_start": int32([1, 2, 3])}),
    ("query_start", {"query_start": int32([0, 4, 3])}),
    ("query_start", {"query_start": int32([0, 3])}),
    ("context_lens", {"context_lens": int32([-1, 5]), "seq_lens": int32([1, 6])}),
    ("context_lens", {"context_lens": int32([3])}),
    ("seq_lens", {"seq_lens": int32([5, 7])}),
    ("seq_lens", {"context_lens": int32([2**31 - 1, 5]), "seq_lens": int32([-(2**31) + 1, 6])}),
    ("seq_lens", {"seq_lens": np.array([5, 6])}),
]
BAD_TENSORS = [
    ("q", {"q": torch.zeros(3, 3, 16)}),
    ("q", {"q": torch.zeros(3, 0, 16)}),
    ("q", {"q": torch.zeros(3, 64)}),
    ("q", {"q": torch.zeros(3, 4, 17)}),
    ("q", {"q": torch.zeros(3, 4, 16, dtype=torch.bfloat16)}),
    ("q", {"q": torch.zeros(3, 4, 16, device="meta")}),
    ("query_start", {"q": torch.zeros(4, 4, 16)}),
    ("keys", {"keys": torch.zeros(OUTSIDE, 2, 4)}),
    ("keys", {"keys": torch.zeros(OUTSIDE, 0, 4, 16)}),
    ("keys", {"keys": torch.zeros(OUTSIDE, 2, 4, 16, dtype=torch.int32)}),
    ("values", {"values": torch.zeros(OUTSIDE, 2, 4, 32)}),
    ("values", {"values": torch.zeros(OUTSIDE, 2, 4, 16, dtype=torch.float16)}),
    ("scale", {"options": AttentionOptions(scale=float("nan"))}),
    ("scale", {"options": AttentionOptions(scale=float("inf"))}),
]


def refused_field(launch: Callable[..., torch.Tensor], case: object) -> str:
    with pytest.raises(InvalidArgumentError) as refusal:
        launch(case.q, case.cache, case.batch, case.options)
    return refusal.value.field


@pytest.mark.parametrize("launch", [prefill, decode])
@pytest.mark.parametrize(("field", "change"), BAD_BATCHES)
def test_a_batch_that_does_not_fit_is_refused_by_name(
    launch: Callable[..., torch.Tensor], field: str, change: dict[str, np.ndarray]
) -> None:
    case = replace(CASE, batch=replace(CASE.batch, **change))
    assert refused_field(launch, case) == field


@pytest.mark.parametrize("launch", [prefill, decode])
@pytest.mark.parametrize(("field", "change"), BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    launch: Callable[..., torch.Tensor], field: str, change: dict[str, object]
) -> None:
    views = {name: tensor for name, tensor in change.items() if name in ("keys", "values")}
    others = {name: value for name, value in change.items() if name not in views}
    case = replace(CASE, cache=replace(CASE.cache, **views), **others)
    assert refused_field(launch, case) == field


@pytest.mark.parametrize("launch", [prefill, decode])
def test_a_batch_that_fits_one_pool_is_checked_again_for_another(
    launch: Callable[..., torch.Tensor],
) -> None:
    batch = replace(CASE.batch)
    launch(CASE.q, CASE.cache, batch, CASE.options)
    few = replace(CASE.cache, keys=CASE.cache.keys[:2], values=CASE.cache.values[:2])
    for _ in range(2):
        assert refused_field(launch, replace(CASE, cache=few, batch=batch)) == "block_tables"
    more = replace(CASE, q=torch.zeros(4, 4, 16), batch=batch)
    assert refused_field(launch, more) == "query_start"
    launch(CASE.q, CASE.cache, batch, CASE.options)
