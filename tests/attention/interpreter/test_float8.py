"""float8 taken apart by hand equals torch's conversions."""

from __future__ import annotations

import torch

from tests.attention.float8_cases import (
    PATTERNS,
    TILE,
    around_every_rounding,
    decoded,
    encoded,
    every_float16,
)


def test_every_pattern_is_decoded_as_by_torch() -> None:
    expected = PATTERNS.view(torch.float8_e4m3fn).float()
    numbers = decoded(PATTERNS)
    assert torch.equal(numbers.isnan(), expected.isnan())
    assert expected.isnan().sum() == 2
    rest = ~expected.isnan()
    # Bit by bit: minus zero too.
    assert torch.equal(numbers[rest].view(torch.int32), expected[rest].view(torch.int32))


def test_every_float16_is_encoded_as_by_torch() -> None:
    numbers = every_float16()
    expected = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encoded(numbers), expected)


def test_float32_is_encoded_as_by_torch_around_every_rounding() -> None:
    numbers = around_every_rounding()
    expected = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encoded(numbers), expected)
    assert len(expected.unique()) == 254  # every number there is


def test_any_nan_is_encoded_as_one() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.zeros(TILE - len(bits))])
    assert numbers.isnan().sum() == len(bits)
    assert encoded(numbers)[: len(bits)].view(torch.float8_e4m3fn).float().isnan().all()
