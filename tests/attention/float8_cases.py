"""float8 e4m3 as kernels read and write it, for every pattern and around every rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from prefixcache.attention.kernels.float8 import decode_e4m3, encode_e4m3

TILE = 1024
PATTERNS = torch.arange(256).to(torch.uint8)


@triton.jit
def _decode(patterns, numbers, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(numbers + place, decode_e4m3(tl.load(patterns + place)))


@triton.jit
def _encode(numbers, patterns, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(patterns + place, encode_e4m3(tl.load(numbers + place)))


def decoded(patterns: torch.Tensor) -> torch.Tensor:
    """`[n] uint8` -> `[n] float32`."""
    numbers = torch.zeros(patterns.shape, device=patterns.device)
    _decode[(1,)](patterns, numbers, len(patterns))
    return numbers


def encoded(numbers: torch.Tensor) -> torch.Tensor:
    """`[n] float32`, n a multiple of TILE -> `[n] uint8`."""
    patterns = torch.zeros(numbers.shape, dtype=torch.uint8, device=numbers.device)
    _encode[(len(numbers) // TILE,)](numbers, patterns, TILE)
    return patterns


def every_float16() -> torch.Tensor:
    """What is out of range saturated; `[65536] float32`."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return halves.float().clamp(-448, 448)


def around_every_rounding() -> torch.Tensor:
    """float8 numbers, the middles between neighbours, all within 2 units of float32's last place,
    the least float32 numbers, and others at random; `[n] float32`, n a multiple of TILE."""
    numbers = PATTERNS[:127].view(torch.float8_e4m3fn).float()
    marks = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    bits = marks.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    near = bits.flatten().clamp(min=0).view(torch.float32)
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(2**16, generator=generator) * 2.0 ** torch.linspace(-30, 8, 2**16)
    signed = torch.cat([near, -near, spread]).clamp(-448, 448)
    return torch.cat([signed, torch.zeros(-len(signed) % TILE)])
