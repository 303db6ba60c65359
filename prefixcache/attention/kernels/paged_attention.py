"""Causal attention of new tokens over the K/V in the blocks of a pool: one kernel for any mix.

A sequence may bring a prompt's chunk, one token, or a few drafts. Its tokens are cut into parts of
BLOCK_Q, and the rows of a program's matrix are those tokens times the query heads that share one
KV head: K/V are read once for all of them. Keys go by in tiles of BLOCK_N: first those that every
row may see, without any mask, then those around the diagonal, with one.

Programs are (query part, KV head and part of its group, split). No size on the host depends on a
length: the first axis has `T // BLOCK_Q + S` programs, enough for any lengths with these sums, and
a program finds its sequence itself; those left over return at once. With NUM_SPLITS > 1 each
sequence's keys are cut into up to that many runs, by its own length, and `combine` joins them.

Softmax is online, in float32 and to the base 2. Rejected: one program a KV head for a whole
sequence (a long context keeps a few cores busy and the others idle), and a mask in every tile
(compares and selects then cost as much as the exponentials).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_start, part, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that query part `part` belongs to; part < T // BLOCK_Q + num_sequences.

    Sequence i has parts query_start[i] // BLOCK_Q + i and following, which is room for all its
    tokens: ceil(n / b) <= (start + n) // b - start // b + 1.
    """
    low = tl.full((), 0, tl.int32)
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= part:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_tile(
    q,
    maximum,
    total,
    sums,
    tile_start,
    row_positions,
    key_end,
    key_cache,
    value_cache,
    block_table,
    key_strides,
    value_strides,
    scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One more tile of keys in the online softmax: the new (maximum, total, sums).

    q: `[BLOCK_M, BLOCK_D]`; maximum, total: `[BLOCK_M] fp32`, the maximum scaled to the base 2;
    sums: `[BLOCK_M, BLOCK_D] fp32`. MASKED: the tile has keys at or past `key_end`, which are not
    read, or keys that a row at `row_positions` must not see.
    """
    positions = tile_start + tl.arange(0, BLOCK_N)
    elements = tl.arange(0, BLOCK_D)
    if MASKED:
        readable = positions < key_end
        blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=readable, other=0)
    else:
        blocks = tl.load(block_table + positions // BLOCK_SIZE)
    blocks = blocks.to(tl.int64)
    offsets = (positions % BLOCK_SIZE).to(tl.int64)

    slots = blocks * key_strides[0] + offsets * key_strides[2]
    pointers = key_cache + slots[:, None] + elements[None, :] * key_strides[3]
    if MASKED:
        mask = readable[:, None] & (elements[None, :] < HEAD_DIM)
        keys = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        keys = tl.load(pointers, mask=elements[None, :] < HEAD_DIM, other=0.0)
    else:
        keys = tl.load(pointers)
    # "ieee": by default a device rounds float32 to 10 bits of mantissa (TF32) before it multiplies.
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if MASKED:
        visible = positions[None, :] <= row_positions[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    # A row may have seen nothing yet, and -inf - -inf is NaN.
    finite = new_maximum
    if MASKED:
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    # The scale goes in here, where it is one fused multiply-add an element.
    weights = tl.exp2(scores * scale - finite[:, None])
    shrink = tl.exp2(maximum - finite)
    total = total * shrink + tl.sum(weights, 1)

    slots = blocks * value_strides[0] + offsets * value_strides[2]
    pointers = value_cache + slots[:, None] + elements[None, :] * value_strides[3]
    # V is masked as well as the scores: a weight of 0 does not cancel a NaN in an unused slot.
    if MASKED:
        mask = readable[:, None] & (elements[None, :] < HEAD_DIM)
        values = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        values = tl.load(pointers, mask=elements[None, :] < HEAD_DIM, other=0.0)
    else:
        values = tl.load(pointers)
    sums = sums * shrink[:, None]
    sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
    return new_maximum, total, sums


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def paged_attention_kernel(  # noqa: PLR0915 - one program from its number to its store
    q,
    key_cache,
    value_cache,
    out,
    log_sums,
    block_tables,
    query_start,
    seq_lens,
    scale,
    num_sequences,
    table_stride,
    q_strides,
    key_strides,
    value_strides,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SIGN: tl.constexpr,
):
    """The attention of one part of the queries of one KV head over one run of the keys.

    q: `[T, Hq, D]`; key_cache, value_cache: `[N, Hkv, B, D]`; any strides, as tuples.
    block_tables: `[S, table_stride] i32`; query_start: `[S + 1] i32`; seq_lens: `[S] i32`.
    scale: positive, times log2 e; SIGN (1, 0 or -1) is what q is multiplied with.
    out: `[T, Hq, NUM_SPLITS, D]`, contiguous, of any float dtype.
    log_sums: `[T, Hq, NUM_SPLITS] fp32`, to the base 2, -inf where a split has no keys (its out is
    not written then); None with one split.
    GROUP_PART: heads of the GROUP that one program has. MIN_SPLIT: keys below which a run is not
    cut further, a multiple of BLOCK_N.

    Grid: `(T // BLOCK_Q + S, Hkv * ceil(GROUP / GROUP_PART), NUM_SPLITS)` with
    BLOCK_Q = BLOCK_M // GROUP_PART.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PART
    GROUP_PARTS: tl.constexpr = (GROUP + GROUP_PART - 1) // GROUP_PART
    part = tl.program_id(0)
    kv_head = tl.program_id(1) // GROUP_PARTS
    split = tl.program_id(2)

    sequence = find_sequence(query_start, part, num_sequences, BLOCK_Q)
    first_token = tl.load(query_start + sequence)
    num_tokens = tl.load(query_start + sequence + 1) - first_token
    first_query = (part - first_token // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= num_tokens:
        return
    seq_len = tl.load(seq_lens + sequence)
    # Where the first and the last query of this program stand.
    first_position = seq_len - num_tokens + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP_PART
    group_heads = tl.program_id(1) % GROUP_PARTS * GROUP_PART + rows % GROUP_PART
    row_exists = (rows < BLOCK_Q * GROUP_PART) & (queries < num_tokens) & (group_heads < GROUP)
    tokens = (first_token + queries).to(tl.int64)
    heads = kv_head * GROUP + group_heads
    outputs = (tokens * NUM_QUERY_HEADS + heads) * NUM_SPLITS + split

    key_start = 0
    key_end = last_position + 1
    if NUM_SPLITS > 1:
        run = tl.cdiv(tl.cdiv(seq_len, NUM_SPLITS), BLOCK_N) * BLOCK_N
        run = tl.maximum(run, MIN_SPLIT)
        key_start = split * run
        key_end = tl.minimum(key_end, key_start + run)
        if key_start >= key_end:
            nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            tl.store(log_sums + outputs, nothing, mask=row_exists)
            return

    elements = tl.arange(0, BLOCK_D)
    element_exists = row_exists[:, None] & (elements[None, :] < HEAD_DIM)
    pointers = q + (tokens * q_strides[0] + heads.to(tl.int64) * q_strides[1])[:, None]
    pointers += elements[None, :] * q_strides[2]
    q_rows = tl.load(pointers, mask=element_exists, other=0.0)
    if SIGN != 1:
        q_rows = (q_rows.to(tl.float32) * SIGN).to(q_rows.dtype)
    # Rows that do not exist see what the last one sees, so that none of their numbers is special.
    row_positions = tl.minimum(first_position + rows // GROUP_PART, last_position)

    block_table = block_tables + sequence.to(tl.int64) * table_stride
    key_cache += kv_head.to(tl.int64) * key_strides[1]
    value_cache += kv_head.to(tl.int64) * value_strides[1]
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    sums = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    # Whole tiles up to the first query's own position are visible to every row.
    num_plain = tl.maximum(tl.minimum(first_position + 1, key_end) - key_start, 0)
    plain_end = key_start + num_plain // BLOCK_N * BLOCK_N
    for tile_start in tl.range(key_start, plain_end, BLOCK_N):
        maximum, total, sums = attend_tile(
            q_rows,
            maximum,
            total,
            sums,
            tile_start,
            row_positions,
            key_end,
            key_cache,
            value_cache,
            block_table,
            key_strides,
            value_strides,
            scale,
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
            row_positions,
            key_end,
            key_cache,
            value_cache,
            block_table,
            key_strides,
            value_strides,
            scale,
            True,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
        )

    # A row may see none of this split's keys.
    divisor = tl.where(total > 0.0, total, 1.0)
    result = sums / divisor[:, None]
    pointers = out + outputs[:, None] * HEAD_DIM + elements[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=element_exists)
    if NUM_SPLITS > 1:
        log_sum = tl.where(total > 0.0, maximum + tl.log2(divisor), float("-inf"))
        tl.store(log_sums + outputs, log_sum, mask=row_exists)
