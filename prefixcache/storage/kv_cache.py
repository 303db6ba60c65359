"""One layer of the pool as attention sees it: tensors over the memory, and how to read them.

Owns nothing: the views are made by `pool_views`, and by whoever has K/V memory of their own. A
new way to store K/V is another value of this class, not another argument of every operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_STORED = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest magnitude that a quantised cache stores; int8 is symmetric."""
SMALLEST_SCALE = 2.0**-126
"""A normal float32, so that no division by it depends on how a device treats smaller ones."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """What stored integers and float8 numbers are multiplied with to be K/V again.

    keys, values: `[N, Hkv, B] float32`, any strides; a scale for a whole block's layer is a view
    whose head and token strides are 0.
    fixed: the scales of K and of V that `write_kv` quantises with and stores beside the tokens.
    None: it takes each token's head by its own largest magnitude.
    """

    keys: torch.Tensor
    values: torch.Tensor
    fixed: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """K/V of one layer in the blocks of a pool.

    keys: `[N, Hkv, B, D]`; values: `[N, Hkv, B, Dv]`, of the same dtype; any strides.
    scales: of a quantised cache (float8_e4m3fn or int8), else None.
    is_latent: there is one KV head, and V are the first Dv elements of K: `values` is a view of
    `keys`, and only K is written (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434).
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None = None
    is_latent: bool = False
