"""float8 e4m3 taken apart by hand, for cards that have no instruction for it (before sm_89).

Format: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinities, and NaN is
all ones (Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433).
"""

from __future__ import annotations

import triton
import triton.language as tl

_BIAS = tl.constexpr(2.0**120)  # float32 has a bias of 127
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)  # 2**-6 as float32
_LARGEST_FINITE = tl.constexpr(0x7F800000)  # as float32: what is above is NaN
_HALF_MANTISSA = tl.constexpr(0x7FFFF)  # of the 20 bits that float32 has more, less one
_SHIFT = tl.constexpr(2.0**14)  # a float32 of this size has its last bit at 2**-9
_SHIFT_BITS = tl.constexpr(0x46800000)


@triton.jit
def decode_e4m3(patterns):
    """The float32 numbers of `uint8` patterns."""
    # Sign, exponent and mantissa at their places in float32, where subnormal numbers stay exact.
    bits = patterns.to(tl.int8, bitcast=True).to(tl.int32).to(tl.uint32, bitcast=True) << 20
    numbers = (bits & 0x87F00000).to(tl.float32, bitcast=True) * _BIAS
    return tl.where((patterns & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def encode_e4m3(numbers):
    """The `uint8` patterns of float32 numbers in [-448, 448] or NaN, rounded to nearest even."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > _LARGEST_FINITE
    magnitude = tl.where(is_nan, 0, magnitude)
    normal = ((magnitude + _HALF_MANTISSA + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal results are multiples of 2**-9: the addition rounds to them.
    shifted = magnitude.to(tl.float32, bitcast=True) + _SHIFT
    subnormal = shifted.to(tl.int32, bitcast=True) - _SHIFT_BITS
    pattern = tl.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    pattern = tl.where(is_nan, 0x7F, pattern)
    return (pattern | ((bits >> 24) & 0x80)).to(tl.uint8)
