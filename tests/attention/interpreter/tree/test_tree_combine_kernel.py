"""Joining any number of parts a token, with junk in the parts that have no keys."""

from __future__ import annotations

import math

import pytest
import torch

from prefixcache.attention.kernels.tree_combine import tree_combine_kernel
from tests.attention.paged_cases import DTYPES
from tests.support.tolerances import assert_close

HEADS, HEAD_DIM, BLOCK_P = 3, 20, 4
COUNTS = [1, 0, 4, 5, 11, 2]
"""Parts of each token: none, as many as are loaded at a time, and one more."""


def random_parts(spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """parts `[slots, HEADS, HEAD_DIM]` and log_sums `[slots, HEADS]`, some of them without keys."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(sum(COUNTS), HEADS, HEAD_DIM, generator=generator)
    log_sums = torch.randn(sum(COUNTS), HEADS, generator=generator) * spread
    log_sums[::3, 1] = -torch.inf
    return parts.masked_fill(torch.isneginf(log_sums)[..., None], torch.nan), log_sums


def slots_of_tokens() -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """The slots in random order, as lists and as the kernel wants them."""
    order = torch.randperm(sum(COUNTS), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, *COUNTS]).cumsum(0)
    lists = [part.tolist() for part in order.split(COUNTS)]
    return lists, starts.int(), order.int()


def joined(
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    _, starts, slots = slots_of_tokens()
    out = torch.full((len(COUNTS), HEADS, HEAD_DIM), torch.nan, dtype=dtype)
    tree_combine_kernel[(len(COUNTS), HEADS)](
        parts,
        log_sums,
        out,
        starts,
        slots,
        sinks,
        HEAD_DIM=HEAD_DIM,
        BLOCK_D=32,
        BLOCK_P=BLOCK_P,
    )
    return out


def exact(
    parts: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.zeros(len(COUNTS), HEADS, HEAD_DIM, dtype=torch.float64)
    for token, slots in enumerate(slots_of_tokens()[0]):
        for head in range(HEADS):
            known = [slot for slot in slots if log_sums[slot, head] > -torch.inf]
            if known:
                scores = log_sums[known, head].double() * math.log(2)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double() * math.log(2)])
                weights = torch.softmax(scores, dim=0)[: len(known)]
                out[token, head] = weights @ parts[known, head].double()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 3.0, 1e4])
def test_parts_weigh_as_much_as_their_sums(dtype: torch.dtype, spread: float) -> None:
    parts, log_sums = random_parts(spread)
    assert_close(joined(parts, log_sums, dtype), exact(parts, log_sums))


def test_a_sink_takes_its_share_once() -> None:
    parts, log_sums = random_parts(3.0)
    sinks = torch.tensor([0.0, 4.0, -3.0])
    out = joined(parts, log_sums, sinks=sinks)
    assert_close(out, exact(parts, log_sums, sinks))
    assert not torch.allclose(out, joined(parts, log_sums))


def test_a_token_without_parts_is_zeros() -> None:
    parts, log_sums = random_parts(3.0)
    assert torch.equal(joined(parts, log_sums)[1], torch.zeros(HEADS, HEAD_DIM))
