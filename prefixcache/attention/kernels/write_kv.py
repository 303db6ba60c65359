"""Scatter the K/V of new tokens into the slots of a paged cache, quantised where the cache is.

A row is one head of one token: in the pool's own layout one run of D elements, at its source and
at its destination. A program takes many rows, so that a decode step, with one token a sequence,
still has loads to overlap. Quantised, a row's largest magnitude is found while it is in registers:
nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixcache.attention.kernels.float8 import encode_e4m3

_LARGEST_FLOAT8 = tl.constexpr(448.0)
_LARGEST_INT8 = tl.constexpr(127.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # a float32 of this size has its last bit at 1
_ROUNDING_BITS = tl.constexpr(0x4B400000)


@triton.jit
def quantize_rows(rows, fixed, stored_type: tl.constexpr):
    """`[TILE_ROWS, BLOCK_D] fp32` in another type, and a scale a row: `fixed`, if not None.

    The arithmetic is that of `reference.write_kv.quantize`, bit by bit. stored_type: float8e4nv,
    its patterns as uint8, or int8.
    """
    LARGEST: tl.constexpr = _LARGEST_INT8 if stored_type == tl.int8 else _LARGEST_FLOAT8
    if fixed is None:
        # A maximum drops NaN, and the scale must not.
        has_nan = tl.max((rows != rows).to(tl.int32), 1) > 0
        largest = tl.max(tl.where(rows != rows, 0.0, tl.abs(rows)), 1)
        scales = tl.maximum(tl.div_rn(largest, LARGEST), _SMALLEST_SCALE)
        scales = tl.where(has_nan, float("nan"), scales)
    else:
        scales = tl.full((rows.shape[0],), 0.0, tl.float32) + fixed
    # "/" may be an approximation on a device.
    scaled = tl.div_rn(rows, tl.broadcast_to(scales[:, None], rows.shape))
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    if stored_type == tl.int8:
        scaled = tl.where(scaled != scaled, 0.0, scaled)
        # The addition rounds to nearest even, and leaves an integer in the last bits.
        stored = ((scaled + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS).to(tl.int8)
    elif stored_type == tl.uint8:
        stored = encode_e4m3(scaled)
    else:
        stored = scaled.to(stored_type)
    return stored, scales


@triton.jit
def load_rows(new, strides, tokens, heads, elements, mask, IS_QUANTIZED: tl.constexpr):
    """`[TILE_ROWS, BLOCK_D]` of new K or V."""
    rows = new + tokens * strides[0] + heads * strides[1]
    pointers = rows[:, None] + elements * strides[2]
    if IS_QUANTIZED:
        # Elements that are none must not be the largest.
        loaded = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        loaded = tl.load(pointers, mask=mask)
    return loaded


@triton.jit
def store_rows(
    cache,
    strides,
    scales,
    scale_strides,
    fixed,
    rows,
    heads,
    elements,
    blocks,
    offsets,
    mask,
    is_written,
):
    """K or V into their slots, and the scales beside them."""
    if scales is not None:
        rows, row_scales = quantize_rows(rows, fixed, cache.dtype.element_ty)
        if fixed is not None:
            is_written = is_written & (heads == 0)  # one number for all heads of a block
        pointers = scales + blocks * scale_strides[0] + heads * scale_strides[1]
        tl.store(pointers + offsets * scale_strides[2], row_scales, mask=is_written)
    slots = cache + blocks * strides[0] + heads * strides[1] + offsets * strides[2]
    tl.store(slots[:, None] + elements * strides[3], rows, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def write_kv_kernel(
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    k,
    v,
    slot_mapping,
    fixed_key_scale,
    fixed_value_scale,
    num_rows,
    key_cache_strides,
    value_cache_strides,
    key_scale_strides,
    value_scale_strides,
    k_strides,
    v_strides,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Row r is head r % NUM_HEADS of token r // NUM_HEADS; num_rows = T * NUM_HEADS.

    key_cache, value_cache: `[N, Hkv, B, D]`; k, v: `[T, Hkv, D]`; each with its strides in
    elements, as a tuple. slot_mapping: `[T] int64`, contiguous; a token with a negative slot is not
    written. v None: there are no V to write. BLOCK_D: the power of two from D on.

    key_scales, value_scales: None for caches of the dtype of k and v, whose bits are moved; else
    `[N, Hkv, B] fp32`, of caches of int8, float8 e4m3 or its patterns as uint8. The fixed scales
    are None where each row gets its own.

    Grid: `(ceil(num_rows / TILE_ROWS),)`.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    # int64 from here on: a slot times a stride exceeds 32 bits in every real pool.
    tokens = (rows // NUM_HEADS).to(tl.int64)
    heads = (rows % NUM_HEADS).to(tl.int64)
    elements = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    slots = tl.load(slot_mapping + tokens, mask=rows < num_rows, other=-1)
    is_written = slots >= 0
    mask = is_written[:, None] & (elements < HEAD_DIM)
    blocks = slots // BLOCK_SIZE
    offsets = slots % BLOCK_SIZE

    # Both are on their way before the first one is waited for.
    keys = load_rows(k, k_strides, tokens, heads, elements, mask, key_scales is not None)
    if v is not None:
        values = load_rows(v, v_strides, tokens, heads, elements, mask, value_scales is not None)
    store_rows(
        key_cache,
        key_cache_strides,
        key_scales,
        key_scale_strides,
        fixed_key_scale,
        keys,
        heads,
        elements,
        blocks,
        offsets,
        mask,
        is_written,
    )
    if v is not None:
        store_rows(
            value_cache,
            value_cache_strides,
            value_scales,
            value_scale_strides,
            fixed_value_scale,
            values,
            heads,
            elements,
            blocks,
            offsets,
            mask,
            is_written,
        )
