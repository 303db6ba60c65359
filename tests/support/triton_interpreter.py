"""Repairs of Triton's interpreter, so that tests under it mean something.

numpy has neither bfloat16 nor float8, so the interpreter keeps those as bit patterns in integers
and, in triton 3.6 to 3.9, gets wrong (`tests/attention/interpreter/test_repairs.py` shows each):

- `tl.dot` of bfloat16 multiplies the patterns;
- float32 -> bfloat16 truncates instead of rounding to nearest even;
- integers -> bfloat16 or float8 store the integer as the pattern;
- float32 -> float8 wraps round out of range and truncates subnormal results;
- arithmetic on bfloat16 and float8 tensors computes with the patterns;
- a 32-bit index that overflows wraps round in silence, as on a device.

`repaired` replaces the conversions by torch's, with saturation for float8 as devices do it, and
makes the last two raise. It also puts the interpreter's functions into triton's modules once for
all launches: the interpreter does it again at each call of each device function, which takes
longer than most of them run, and then leaves them there. Not repaired: `input_precision` is
ignored (all products are exact), and launches, alignment and races are not exercised at all.

The interpreter is global state of the process: use it from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

PATTERNS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
"""The types that the interpreter holds as bit patterns."""

Handle = interpreter.TensorHandle
Array = np.ndarray[Any, np.dtype[Any]]


@contextmanager
def repaired() -> Iterator[None]:
    """The interpreter with its repairs, for as long as the context lasts."""
    builder = interpreter.InterpreterBuilder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "cast_impl", _cast(builder.cast_impl))
        patch.setattr(builder, "create_fp_to_fp", _convert(builder.create_fp_to_fp))
        patch.setattr(builder, "create_dot", _dot)
        patch.setattr(builder, "binary_op", _no_patterns(builder.binary_op))
        patch.setattr(builder, "unary_op", _no_patterns(builder.unary_op))
        options = interpreter.InterpreterOptions(debug=True)  # check the overflow of indices
        patch.setattr(interpreter.interpreter_builder, "options", options)
        # Once for all launches: both names under which kernels and triton's library know it.
        modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(modules)
        patch.setattr(interpreter, "_patch_lang", lambda _function: interpreter._LangPatchScope())
        try:
            yield
        finally:
            scope.restore()


def _to_numpy(handle: Handle) -> Array:
    """The numbers of a tensor: bit patterns as float32, anything else as it is."""
    dtype = PATTERNS.get(handle.dtype.scalar)
    if dtype is None:
        return handle.data
    pattern = torch.from_numpy(np.array(handle.data, order="C"))
    return pattern.view(dtype).float().numpy()


def _from_numpy(numbers: Array, dtype: Any) -> Handle:
    """A tensor of the given Triton type: rounded to nearest even, float8 saturated."""
    scalar = dtype.scalar
    target = PATTERNS.get(scalar)
    if target is None:
        return Handle(numbers.astype(interpreter._get_np_dtype(scalar)), scalar)
    exact = torch.from_numpy(np.array(numbers, dtype=np.float32, order="C"))
    if target != torch.bfloat16:
        largest = torch.finfo(target).max
        exact = exact.clamp(-largest, largest)  # keeps NaN
    integers = torch.int16 if target == torch.bfloat16 else torch.uint8
    pattern = exact.to(target).view(integers).numpy()
    return Handle(pattern.view(interpreter._get_np_dtype(scalar)), scalar)


def _cast(original: Callable[..., Handle]) -> Callable[..., Handle]:
    def cast_impl(builder: Any, source: Handle, dtype: Any) -> Handle:
        if source.dtype.scalar in PATTERNS or dtype.scalar in PATTERNS:
            return _from_numpy(_to_numpy(source), dtype)
        return original(builder, source, dtype)

    return cast_impl


def _convert(original: Callable[..., Handle]) -> Callable[..., Handle]:
    def create_fp_to_fp(builder: Any, source: Handle, dtype: Any, rounding: Any) -> Handle:
        if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            return original(builder, source, dtype, rounding)
        return _from_numpy(_to_numpy(source), dtype)

    return create_fp_to_fp


def _dot(_builder: Any, a: Handle, b: Handle, accumulator: Handle, *_options: Any) -> Handle:
    kind = accumulator.data.dtype
    product = np.matmul(_to_numpy(a), _to_numpy(b), dtype=kind)
    return Handle(product + accumulator.data, accumulator.dtype.scalar)


def _no_patterns(original: Callable[..., Handle]) -> Callable[..., Handle]:
    def operation(builder: Any, operand: Handle, *rest: Any) -> Handle:
        if operand.dtype.scalar in PATTERNS:
            raise TypeError(f"the interpreter cannot compute in {operand.dtype}: use float32")
        return original(builder, operand, *rest)

    return operation
