"""`AttentionOptions` in the form in which kernels apply them.

Scores are to the base 2, so that a weight is one exp2; numbers that float32 cannot hold are brought
into its range here, where that changes no weight. Pure, but for numbers kept on a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from prefixcache.types import AttentionOptions

_SMALLEST_FACTOR = 2.0**-126  # a normal float32; below it all weights are equal
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_LARGEST_CAP = 2.0**60  # a higher one changes no score within float32's precision
_LARGEST_WINDOW = 2**31 - 1
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Weighing:
    """Arguments of a kernel; None for an option that is not there."""

    sign: int
    """What q is multiplied with: a kernel takes a row's maximum before it scales, which only a
    positive scale leaves alone."""
    scale: float
    cap_scale: float | None
    window: int | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None


def weigh(options: AttentionOptions, head_dim: int, device: torch.device) -> Weighing:
    """The options of queries of `head_dim` elements, already checked."""
    scale = options.scale_for(head_dim)
    sign = (scale > 0) - (scale < 0)
    factor, cap_scale = abs(scale) * _LOG2_E, None
    cap = options.soft_cap
    if factor >= _SMALLEST_FACTOR and cap is not None and cap < _LARGEST_CAP:
        factor, cap_scale = cap * _LOG2_E, min(abs(scale) / cap, _LARGEST_FLOAT32)
    if factor < _SMALLEST_FACTOR:
        sign, factor, cap_scale = 0, 1.0, None
    window = options.window
    return Weighing(
        sign,
        factor,
        cap_scale,
        None if window is None else min(window, _LARGEST_WINDOW),
        _on_device(options.alibi_slopes, device) if options.alibi_slopes else None,
        _on_device(options.sinks, device) if options.sinks else None,
    )


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Scores, to the base 2: `[Hq] float32`. Kept, since a model's are the same at each call."""
    scores = torch.tensor(numbers, dtype=torch.float64) * _LOG2_E
    return scores.clamp(-_LARGEST_FLOAT32, _LARGEST_FLOAT32).to(device, torch.float32)
