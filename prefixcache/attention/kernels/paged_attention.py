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

from prefixcache.attention.kernels.float8 import decode_e4m3

_TWO_LOG2_E = tl.constexpr(2.8853900817779268)
# Weights times a small scale of V would lose bits as subnormal float16.
VALUE_SHIFT = tl.constexpr(64.0)


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
def load_kv(
    cache,
    strides,
    blocks,
    offsets,
    readable,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """K or V of some slots as they are stored, without their scales: `[BLOCK_N, BLOCK_D] DTYPE`."""
    elements = tl.arange(0, BLOCK_D)
    slots = blocks * strides[0] + offsets * strides[2]
    pointers = cache + slots[:, None] + elements[None, :] * strides[3]
    # V is masked as well as the scores: a weight of 0 does not cancel a NaN in an unused slot.
    if MASKED:
        stored = tl.load(
            pointers, mask=readable[:, None] & (elements[None, :] < HEAD_DIM), other=0.0
        )
    elif HEAD_DIM < BLOCK_D:
        stored = tl.load(pointers, mask=elements[None, :] < HEAD_DIM, other=0.0)
    else:
        stored = tl.load(pointers)
    # Every float8 and int8 number is one of 16 bits too.
    if cache.dtype.element_ty == tl.uint8:
        stored = decode_e4m3(stored)
    return stored.to(DTYPE)


@triton.jit
def load_scales(scales, strides, blocks, offsets, readable, MASKED: tl.constexpr):
    """What the K or V of some slots are multiplied with: `[BLOCK_N] fp32`."""
    pointers = scales + blocks * strides[0] + offsets * strides[2]
    return tl.load(pointers, mask=readable, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def tanh(numbers):
    """To a few units in the last place."""
    power = tl.exp2(tl.abs(numbers) * -_TWO_LOG2_E)
    large = (1.0 - power) / (1.0 + power)
    large = tl.where(numbers < 0.0, -large, large)
    # Near zero that difference cancels; the Taylor series of tanh(x) / x does not.
    square = tl.minimum(numbers * numbers, 0.0625)
    series = square * (62 / 2835) - 17 / 315
    series = ((series * square + 2 / 15) * square - 1 / 3) * square + 1.0
    return tl.where(square < 0.0625, numbers * series, large)


@triton.jit
def attend_tile(
    q,
    maximum,
    total,
    sums,
    tile_start,
    row_positions,
    key_begin,
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
    window,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One more tile of keys in the online softmax: the new (maximum, total, sums).

    q: `[BLOCK_M, BLOCK_D]`; maximum, total: `[BLOCK_M] fp32`, the maximum scaled to the base 2;
    sums: `[BLOCK_M, BLOCK_D] fp32`. MASKED: the tile has keys outside `[key_begin, key_end)`, which
    are not read, or keys that a row at `row_positions` must not see. slopes: `[BLOCK_M] fp32`.
    """
    positions = tile_start + tl.arange(0, BLOCK_N)
    readable = positions < key_end
    if MASKED:
        if window is not None:
            readable = readable & (positions >= key_begin)
        blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=readable, other=0)
    else:
        blocks = tl.load(block_table + positions // BLOCK_SIZE)
    blocks = blocks.to(tl.int64)
    offsets = (positions % BLOCK_SIZE).to(tl.int64)

    keys = load_kv(
        key_cache, key_strides, blocks, offsets, readable, MASKED, HEAD_DIM, BLOCK_D, q.dtype
    )
    # "ieee": by default a device rounds float32 to 10 bits of mantissa (TF32) before it multiplies.
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if key_scales is not None:
        # A key's scale is a factor of its score: one multiplication, not one an element.
        factors = load_scales(key_scales, key_scale_strides, blocks, offsets, readable, MASKED)
        scores = scores * factors[None, :]
    if cap_scale is not None:
        scores = tanh(scores * cap_scale)
    if slopes is not None:
        distances = (positions[None, :] - row_positions[:, None]).to(tl.float32)
        scores = scores * scale + slopes[:, None] * distances
        scale = 1.0
    if MASKED:
        visible = positions[None, :] <= row_positions[:, None]
        if window is not None:
            visible = visible & (positions[None, :] > row_positions[:, None] - window)
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

    values = load_kv(
        value_cache, value_strides, blocks, offsets, readable, MASKED, HEAD_DIM, BLOCK_D, q.dtype
    )
    if value_scales is not None:
        factors = load_scales(value_scales, value_scale_strides, blocks, offsets, readable, MASKED)
        weights = weights * (factors * VALUE_SHIFT)[None, :]
    sums = sums * shrink[:, None]
    sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
    return new_maximum, total, sums


@triton.jit(do_not_specialize=["window", "num_sequences", "table_stride"])
def paged_attention_kernel(  # noqa: PLR0912, PLR0915 - a program from its number to its store
    q,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    out,
    log_sums,
    block_tables,
    query_start,
    seq_lens,
    scale,
    cap_scale,
    alibi_slopes,
    sinks,
    window,
    num_sequences,
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
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SIGN: tl.constexpr,
):
    """The attention of one part of the queries of one KV head over one run of the keys.

    q: `[T, Hq, D]`; key_cache, value_cache: `[N, Hkv, B, D]`, of q's dtype, or int8, float8 e4m3 or
    its patterns as uint8 with key_scales, value_scales: `[N, Hkv, B] fp32`; any strides, as tuples.
    block_tables: `[S, table_stride] i32`; query_start: `[S + 1] i32`; seq_lens: `[S] i32`.
    scale: positive, times log2 e; SIGN (1, 0 or -1) is what q is multiplied with. cap_scale: of a
    soft cap c, the positive scale / c; then `scale` is c times log2 e.
    alibi_slopes, sinks: `[Hq] fp32`, times log2 e; with splits `combine` takes the sinks.
    window: tokens that a query sees. What is None is not there, in the machine code neither.
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

    key_begin = 0
    if window is not None:
        key_begin = tl.maximum(first_position + 1 - window, 0)
    key_start = key_begin // BLOCK_N * BLOCK_N
    key_end = last_position + 1
    if NUM_SPLITS > 1:
        run = tl.cdiv(tl.cdiv(key_end - key_start, NUM_SPLITS), BLOCK_N) * BLOCK_N
        run = tl.maximum(run, MIN_SPLIT)
        key_start += split * run
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
    if key_scales is not None:
        key_scales += kv_head.to(tl.int64) * key_scale_strides[1]
        value_scales += kv_head.to(tl.int64) * value_scale_strides[1]
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=row_exists, other=0.0)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    if sinks is not None:
        # A sink is a score that was seen before all others, of a V of zeros.
        maximum = tl.load(sinks + heads, mask=row_exists, other=0.0)
        total += 1.0
    sums = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    # Whole tiles up to the first query's own position are visible to every row, from where the
    # last query's window begins.
    num_plain = tl.maximum(tl.minimum(first_position + 1, key_end) - key_start, 0)
    plain_end = key_start + num_plain // BLOCK_N * BLOCK_N
    plain_start = key_start
    if window is not None:
        seen_by_all = tl.maximum(last_position + 1 - window, key_start)
        plain_start = tl.minimum(tl.cdiv(seen_by_all, BLOCK_N) * BLOCK_N, plain_end)
    for tile_start in tl.range(plain_start, plain_end, BLOCK_N):
        maximum, total, sums = attend_tile(
            q_rows,
            maximum,
            total,
            sums,
            tile_start,
            row_positions,
            key_begin,
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
            window,
            False,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
        )
    # The tiles before the plain ones and those behind them, as if there were none between.
    num_before = plain_start - key_start
    for tile_start in tl.range(plain_end - num_before, key_end, BLOCK_N):
        if window is not None:
            tile_start -= tl.where(tile_start < plain_end, plain_end - plain_start, 0)
        maximum, total, sums = attend_tile(
            q_rows,
            maximum,
            total,
            sums,
            tile_start,
            row_positions,
            key_begin,
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
            window,
            True,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_D,
            BLOCK_N,
        )

    # A row may see none of this split's keys.
    divisor = tl.where(total == 0.0, 1.0, total)
    result = sums / (divisor if value_scales is None else divisor * VALUE_SHIFT)[:, None]
    pointers = out + outputs[:, None] * HEAD_DIM + elements[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=element_exists)
    if NUM_SPLITS > 1:
        # Not of `total > 0`: a NaN is to stay one.
        log_sum = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(log_sums + outputs, log_sum, mask=row_exists)
