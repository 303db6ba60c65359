"""Joining parts by their log-sum-exp, with junk in every part that has no keys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from prefixcache.attention.kernels.combine import combine_kernel
from tests.attention.paged_cases import DTYPES
from tests.support.tolerances import assert_close

JUNK = float("nan")


def joined(
    parts: torch.Tensor, log_sums: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """parts: `[rows, n, D]`, log_sums: `[rows, n]`; returns `[rows, D]`."""
    rows, num_parts, head_dim = parts.shape
    out = torch.full((rows, head_dim), torch.nan, dtype=dtype)
    combine_kernel[(rows,)](
        parts, log_sums, out, HEAD_DIM=head_dim, BLOCK_D=32, NUM_PARTS=num_parts
    )
    return out


def random_parts(has_keys: Sequence[Sequence[bool]], head_dim: int = 20, spread: float = 3.0):
    generator = torch.Generator().manual_seed(0)
    present = torch.tensor(has_keys)
    parts = torch.randn((*present.shape, head_dim), generator=generator)
    log_sums = torch.randn(present.shape, generator=generator) * spread
    return (
        parts.masked_fill(~present[..., None], JUNK),
        log_sums.masked_fill(~present, -torch.inf),
    )


def exact(parts: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(log_sums.double() * torch.log(torch.tensor(2.0).double()), dim=1)
    known = torch.where(torch.isneginf(log_sums)[..., None], 0.0, parts.double())
    return (weights[..., None] * known).sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 3.0, 1e4])
def test_parts_weigh_as_much_as_their_sums(dtype: torch.dtype, spread: float) -> None:
    """All parts, only the first, only the last, a gap; sums far beyond what exp2 can hold."""
    has_keys = [[True] * 4, [True, False, False, False], [False] * 3 + [True], [True, False] * 2]
    parts, log_sums = random_parts(has_keys, spread=spread)
    assert_close(joined(parts, log_sums, dtype), exact(parts, log_sums))


def test_a_single_part_comes_out_as_it_is() -> None:
    parts, log_sums = random_parts([[True], [True]])
    assert torch.equal(joined(parts, log_sums), parts[:, 0])


def test_rows_without_any_keys_are_zeros() -> None:
    parts, log_sums = random_parts([[False] * 8, [True] * 8])
    out = joined(parts, log_sums)
    assert torch.equal(out[0], torch.zeros(20))
    assert_close(out[1:], exact(parts, log_sums)[1:])


def test_no_rows_are_no_output() -> None:
    assert joined(torch.empty(0, 2, 20), torch.empty(0, 2)).shape == (0, 20)
