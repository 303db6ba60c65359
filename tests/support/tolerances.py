"""How far attention may be from float64, per dtype: the one table for all tests.

An output is rounded once to its dtype (half an ulp: 2**-9 relative in bfloat16), and float32
arithmetic errs by less than 1e-6 on normally distributed inputs under a scale of about D ** -0.5
(larger scores have larger errors, which become relative errors of the weights). The rest is room
for kernels that round their softmax weights to the dtype before multiplying.
"""

from __future__ import annotations

import torch

ABSOLUTE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
RELATIVE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def is_close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `actual` equals the float64 `exact` within the tolerance of its dtype."""
    dtype = actual.dtype
    return torch.allclose(actual.double(), exact, rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype])


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Fails, with the worst element, if `is_close` does not hold. NaN and Inf never pass."""
    dtype = actual.dtype
    assert torch.isfinite(actual).all(), "the output has NaN or Inf"
    torch.testing.assert_close(
        actual.double(), exact.double(), rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype]
    )


LOGITS_FACTOR = 2
"""Logits of a whole model may be so much farther from float64 than plain transformers' are: layers
add their roundings up, in every dtype, and another order of the sums is no worse."""


def assert_logits_close(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Whether `actual` is about as near to the float64 `exact` as `plain` is, of the same dtype."""
    assert actual.dtype == plain.dtype
    assert actual.shape == plain.shape == exact.shape
    error = (actual.double() - exact).abs().max().item()
    plain_error = (plain.double() - exact).abs().max().item()
    assert error <= LOGITS_FACTOR * plain_error, f"off by {error}, plain transformers {plain_error}"
