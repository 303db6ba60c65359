"""Attention by a work list, whose items are keys of a block table and the queries that see them.

A run of blocks that several sequences share is an item (or several, if it is long) whose rows are
the queries of all of them, gathered by an index; what a sequence has alone is an item as well, with
a causal mask at its end. So each shared block is read once for up to BLOCK_M rows, whatever tree
the prefixes form (DeFT, arXiv 2404.00242; FastTree; FlashInfer, 2501.01005, plans a list too).
Items leave parts, which `tree_combine` joins.

The list is made on the host once a step, where lengths are known: programs get keys of about equal
number. Rejected: a persistent kernel that takes items off a queue; the items are equal already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixcache.attention.kernels.paged_attention import VALUE_SHIFT, attend_tile

ITEM_NUMBERS = tl.constexpr(7)


@triton.jit(do_not_specialize=["table_stride"])
def tree_attention_kernel(  # noqa: PLR0915 - one program from its item to its store
    q,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    parts,
    log_sums,
    items,
    query_tokens,
    positions,
    block_tables,
    scale,
    cap_scale,
    alibi_slopes,
    table_stride,
    q_strides,
    key_strides,
    value_strides,
    key_scale_strides,
    value_scale_strides,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIGN: tl.constexpr,
):
    """One item, of one KV head and a part of its group.

    q, the caches, scales, options and constants: as in `paged_attention_kernel`.
    items: `[W, 7] i32`: sequence (row of block_tables), first key, end of the keys that every
    query sees, end of the keys, first and end query (places in query_tokens), first slot.
    query_tokens, positions: `[Q] i32` rows of q, and where they stand in their sequences.
    block_tables: `[S, table_stride] i32`.
    parts: `[slots, Hq, D] fp32`, log_sums: `[slots, Hq] fp32`, to the base 2, contiguous: query i
    of an item goes to its slot i; -inf where it sees none of the item's keys (its part is zeros).

    Grid: `(W, Hkv * ceil(GROUP / GROUP_PART))`. An item has at most BLOCK_M // GROUP_PART queries.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PART
    GROUP_PARTS: tl.constexpr = (GROUP + GROUP_PART - 1) // GROUP_PART
    item = items + tl.program_id(0) * ITEM_NUMBERS
    kv_head = tl.program_id(1) // GROUP_PARTS
    sequence = tl.load(item).to(tl.int64)
    key_start = tl.load(item + 1)
    seen_by_all = tl.load(item + 2)
    key_end = tl.load(item + 3)
    first_query = tl.load(item + 4)
    end_query = tl.load(item + 5)
    first_slot = tl.load(item + 6)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP_PART
    group_heads = tl.program_id(1) % GROUP_PARTS * GROUP_PART + rows % GROUP_PART
    row_exists = (rows < BLOCK_Q * GROUP_PART) & (queries < end_query) & (group_heads < GROUP)
    tokens = tl.load(query_tokens + queries, mask=row_exists, other=0).to(tl.int64)
    # Rows that do not exist see all keys, so that none of their numbers is special.
    row_positions = tl.load(positions + queries, mask=row_exists, other=key_end)
    # A query behind the item's keys does as if it stood at the last of them: only its distances
    # change, all by the same number, which ALiBi makes up for below.
    row_ends = tl.minimum(row_positions, key_end - 1)
    heads = kv_head * GROUP + group_heads
    outputs = (first_slot + rows // GROUP_PART).to(tl.int64) * NUM_QUERY_HEADS + heads

    elements = tl.arange(0, BLOCK_D)
    element_exists = row_exists[:, None] & (elements[None, :] < HEAD_DIM)
    pointers = q + (tokens * q_strides[0] + heads.to(tl.int64) * q_strides[1])[:, None]
    pointers += elements[None, :] * q_strides[2]
    q_rows = tl.load(pointers, mask=element_exists, other=0.0)
    if SIGN != 1:
        q_rows = (q_rows.to(tl.float32) * SIGN).to(q_rows.dtype)

    block_table = block_tables + sequence * table_stride
    key_cache += kv_head.to(tl.int64) * key_strides[1]
    value_cache += kv_head.to(tl.int64) * value_strides[1]
    if key_scales is not None:
        key_scales += kv_head.to(tl.int64) * key_scale_strides[1]
        value_scales += kv_head.to(tl.int64) * value_scale_strides[1]
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=row_exists, other=0.0)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    sums = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    plain_end = key_start + (seen_by_all - key_start) // BLOCK_N * BLOCK_N
    for tile_start in tl.range(key_start, plain_end, BLOCK_N):
        maximum, total, sums = attend_tile(
            q_rows,
            maximum,
            total,
            sums,
            tile_start,
            row_ends,
            0,
            key_end,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            block_table,
            key_strides,
            value_strides,
            key_scale_strides,
            value_scale_strides,
            scale,
            cap_scale,
            slopes,
            None,
            False,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
        )
    for tile_start in tl.range(plain_end, key_end, BLOCK_N):
        maximum, total, sums = attend_tile(
            q_rows,
            maximum,
            total,
            sums,
            tile_start,
            row_ends,
            0,
            key_end,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            block_table,
            key_strides,
            value_strides,
            key_scale_strides,
            value_scale_strides,
            scale,
            cap_scale,
            slopes,
            None,
            True,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
        )

    # A query may see none of this item's keys.
    divisor = tl.where(total > 0.0, total, 1.0)
    result = sums / divisor[:, None]
    if value_scales is not None:
        result = result / VALUE_SHIFT
    tl.store(parts + outputs[:, None] * HEAD_DIM + elements[None, :], result, mask=element_exists)
    log_sum = maximum + tl.log2(divisor)
    if alibi_slopes is not None:
        log_sum -= slopes * (row_positions - row_ends).to(tl.float32)
    log_sum = tl.where(total > 0.0, log_sum, float("-inf"))
    tl.store(log_sums + outputs, log_sum, mask=row_exists)
