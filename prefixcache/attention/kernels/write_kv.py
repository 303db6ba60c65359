"""Scatter the K/V of new tokens into the slots of a paged cache.

Moves bits and computes nothing. A row is one head of one token: in the pool's own layout one run
of D elements, at its source and at its destination. A program takes many rows, so that a decode
step, with one token a sequence, still has loads to overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def write_kv_kernel(
    key_cache,
    value_cache,
    k,
    v,
    slot_mapping,
    num_rows,
    key_cache_strides,
    value_cache_strides,
    k_strides,
    v_strides,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Row r is head r % NUM_HEADS of token r // NUM_HEADS; num_rows = T * NUM_HEADS.

    key_cache, value_cache: `[N, Hkv, B, D]`; k, v: `[T, Hkv, D]` of the same dtype; each with its
    strides in elements, as a tuple. slot_mapping: `[T] int64`, contiguous; a token with a negative
    slot is not written. BLOCK_D: the power of two from D on.

    Grid: `(ceil(num_rows / TILE_ROWS),)`.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    # int64 from here on: a slot times a stride exceeds 32 bits in every real pool.
    tokens = (rows // NUM_HEADS).to(tl.int64)
    heads = (rows % NUM_HEADS).to(tl.int64)
    elements = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    slots = tl.load(slot_mapping + tokens, mask=rows < num_rows, other=-1)
    written = (slots >= 0)[:, None] & (elements < HEAD_DIM)
    blocks = slots // BLOCK_SIZE
    offsets = slots % BLOCK_SIZE

    k_rows = k + tokens * k_strides[0] + heads * k_strides[1]
    v_rows = v + tokens * v_strides[0] + heads * v_strides[1]
    keys = tl.load(k_rows[:, None] + elements * k_strides[2], mask=written)
    values = tl.load(v_rows[:, None] + elements * v_strides[2], mask=written)

    key_rows = key_cache + blocks * key_cache_strides[0] + heads * key_cache_strides[1]
    key_rows += offsets * key_cache_strides[2]
    tl.store(key_rows[:, None] + elements * key_cache_strides[3], keys, mask=written)
    value_rows = value_cache + blocks * value_cache_strides[0] + heads * value_cache_strides[1]
    value_rows += offsets * value_cache_strides[2]
    tl.store(value_rows[:, None] + elements * value_cache_strides[3], values, mask=written)
