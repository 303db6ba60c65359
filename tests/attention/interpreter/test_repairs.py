"""The repairs in tests/support/triton_interpreter.py: needed, and equal to torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
N = 1024


@triton.jit
def convert(source, target, count: tl.constexpr):
    place = tl.arange(0, count)
    tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))


@triton.jit
def multiply(a, b, product, size: tl.constexpr):
    place = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(product + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@triton.jit
def double(numbers, count: tl.constexpr):
    place = tl.arange(0, count)
    loaded = tl.load(numbers + place)
    tl.store(numbers + place, loaded + loaded)


@triton.jit
def add_up(bounds, total):
    result = 0
    for number in range(tl.load(bounds), tl.load(bounds + 1)):
        result += number
    left = tl.load(bounds)
    while left > 0:
        result += 100
        left -= 1
    tl.store(total, result)


@triton.jit
def index(stride, place):
    tl.store(place + tl.arange(0, 4), (tl.arange(0, 4) * tl.load(stride)).to(tl.int64))


@triton.jit
def store_some(wanted, target):
    place = tl.arange(0, 4)
    tl.store(target + place, place, mask=(place != 1) & (tl.load(wanted) > 0))


@triton.jit
def softmax_row(numbers, weights, count: tl.constexpr):
    place = tl.arange(0, count)
    loaded = tl.load(numbers + place)
    shifted = tl.exp(loaded - tl.max(loaded, 0))
    tl.store(weights + place, shifted / tl.sum(shifted, 0))


def values(dtype: torch.dtype) -> torch.Tensor:
    """N values of all sizes: subnormal, ordinary, out of range of smaller types, special."""
    generator = torch.Generator().manual_seed(0)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (N,), generator=generator).to(dtype)
    spread = torch.randn(N, generator=generator) * 2.0 ** torch.linspace(-24, 17, N)
    spread[:12] = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448, 463, 464, 465, 1000, 57344, 61440]
    )
    return spread.to(dtype)


def by_torch(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        return source.float().clamp(-largest, largest).to(dtype)
    return source.float().to(dtype) if source.dtype in FLOAT8 else source.to(dtype)


def by_triton(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=dtype)
    convert[(1,)](source, target, len(source))
    return target


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype:
        return False
    nan = left.float().isnan()  # the pattern of a NaN is nobody's business
    if not torch.equal(nan, right.float().isnan()):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left[~nan].view(integers), right[~nan].view(integers))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("target", FLOATS + FLOAT8)
@pytest.mark.parametrize("source", FLOATS + FLOAT8)
def test_floats_convert_as_in_torch(source: torch.dtype, target: torch.dtype) -> None:
    numbers = by_torch(values(torch.float32), source)
    assert same_bits(by_triton(numbers, target), by_torch(numbers, target))


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_convert_to_bfloat16_as_in_torch(source: torch.dtype) -> None:
    numbers = values(source)
    assert same_bits(by_triton(numbers, torch.bfloat16), numbers.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8])
def test_a_product_is_exact_to_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 32, 32, generator=generator).to(dtype)
    product = torch.empty(32, 32)
    multiply[(1,)](a, b, product, 32)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FLOAT8])
def test_arithmetic_on_bit_patterns_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InterpreterError, match="cannot compute in"):
        double[(1,)](torch.ones(4).to(dtype), 4)


def test_an_index_that_overflows_is_found() -> None:
    place = torch.zeros(4, dtype=torch.int64)
    index[(1,)](torch.tensor([2**29], dtype=torch.int32), place)
    assert place.tolist() == [0, 2**29, 2**30, 3 * 2**29]
    with pytest.raises(InterpreterError, match="int32 overflow"):
        index[(1,)](torch.tensor([2**30], dtype=torch.int32), place)


def test_loops_may_be_bounded_by_loaded_values() -> None:
    """Fails with triton 3.6 and numpy 2.4."""
    total = torch.zeros(1, dtype=torch.int32)
    add_up[(1,)](torch.tensor([3, 7], dtype=torch.int32), total)
    assert total.item() == 3 + 4 + 5 + 6 + 300


def test_tritons_own_reductions_work() -> None:
    numbers, weights = torch.linspace(-3, 3, 16), torch.empty(16)
    softmax_row[(1,)](numbers, weights, 16)
    torch.testing.assert_close(weights, torch.softmax(numbers, 0))


def test_triton_is_as_before_after_the_repairs() -> None:
    run_interpreted(RESTORED)


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_mask_may_be_joined_with_a_scalar(wanted: int) -> None:
    """Fails with triton 3.9."""
    target = torch.full((4,), -1, dtype=torch.int32)
    store_some[(1,)](torch.tensor([wanted], dtype=torch.int32), target)
    assert target.tolist() == ([0, -1, 2, 3] if wanted else [-1] * 4)


RESTORED = f"""
import runpy, torch, triton.language as tl
from triton.runtime import interpreter
from tests.support.triton_interpreter import repaired
def everything():
    places = (tl, tl.core, tl.math, interpreter, interpreter.InterpreterBuilder)
    return [dict(vars(place)) for place in places]
this = runpy.run_path({str(Path(__file__))!r})
before = everything()
with repaired():
    assert everything() != before
    this["softmax_row"][(1,)](torch.zeros(16), torch.zeros(16), 16)
assert everything() == before
"""

UNREPAIRED = f"""
import runpy, torch
this = runpy.run_path({str(Path(__file__))!r})
values, by_torch, by_triton = this["values"], this["by_torch"], this["by_triton"]
for source, target in [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2), (torch.int8, torch.bfloat16),
]:
    numbers = values(source)
    right = this["same_bits"](by_triton(numbers, target), by_torch(numbers, target))
    assert not right, (source, target)
a, b = torch.ones(2, 32, 32).bfloat16()
product = torch.empty(32, 32)
this["multiply"][(1,)](a, b, product, 32)
assert not torch.allclose(product, torch.full((32, 32), 32.0)), "dot"
numbers = torch.ones(4).bfloat16()
this["double"][(1,)](numbers, 4)
assert not torch.equal(numbers, torch.full((4,), 2.0).bfloat16()), "arithmetic"
this["index"][(1,)](torch.tensor([2**30], dtype=torch.int32), torch.zeros(4, dtype=torch.int64))
"""


def run_interpreted(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_without_the_repairs_it_is_wrong() -> None:
    """When this fails, triton has got better, and a repair can go."""
    run_interpreted(UNREPAIRED)
