"""Multi-head latent attention over the latents in the blocks of a pool: one kernel for any mix.

A token's cache entry is R latent elements and P rope elements, the only K of all query heads; V is
the latent part again (DeepSeek-V2, arXiv 2405.04434, section 2.1). So a tile of the cache is read
once, (R + P) elements a token, and used twice: with the queries, in two products since one of
R + P = 576 would be padded to 1024, and with the weights. The rows of a program's matrix are tokens
times query heads, of which one program has a part. Programs of one query part stand side by side in
the grid: they read the same tiles at about the same time, from the L2 cache but for the first.

The rest is as in `paged_attention`: batches of any mix, splits that `combine` joins, online softmax
in float32 to the base 2, no size on the host that depends on a length.

Here every tile is masked, unlike there. The products of a tile are several times larger, so that
compares and selects are lost in them; one loop has half the code, keeps its pipeline full to the
end, and needs up to 80 registers less, which is what lets 64 rows by 512 sums stay in registers.
Tokens past the end are not masked but replaced by the last one, and their weights are 0.
(Rejected: 128 rows a program. Their sums are all the registers that a core has.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixcache.attention.kernels.paged_attention import find_sequence, tanh


@triton.jit
def load_part(pointers, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """`[BLOCK_N, BLOCK_WIDTH]` of the cache: WIDTH elements of each token, and zeros after them."""
    if WIDTH < BLOCK_WIDTH:
        mask = tl.arange(0, BLOCK_WIDTH)[None, :] < WIDTH
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def attend_latents(
    q_latents,
    q_ropes,
    maximum,
    total,
    sums,
    tile_start,
    row_positions,
    key_end,
    cache,
    block_table,
    cache_strides,
    scale,
    cap_scale,
    slopes,
    window,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One more tile of tokens in the online softmax: the new (maximum, total, sums).

    q_latents: `[BLOCK_M, BLOCK_R]`; q_ropes: `[BLOCK_M, BLOCK_P]`, unused if ROPE_DIM is 0;
    maximum, total: `[BLOCK_M] fp32`, the maximum scaled to the base 2; sums: `[BLOCK_M, BLOCK_R]
    fp32`. Nothing at or past `key_end` is read, and a row at `row_positions` sees nothing after it,
    so `key_end` must not be after the last of them. slopes: `[BLOCK_M] fp32`.
    """
    positions = tile_start + tl.arange(0, BLOCK_N)
    read = tl.minimum(positions, key_end - 1)
    blocks = tl.load(block_table + read // BLOCK_SIZE).to(tl.int64)
    offsets = (read % BLOCK_SIZE).to(tl.int64)
    slots = blocks * cache_strides[0] + offsets * cache_strides[2]

    pointers = cache + slots[:, None] + tl.arange(0, BLOCK_R)[None, :] * cache_strides[3]
    latents = load_part(pointers, LATENT_DIM, BLOCK_R)
    # "ieee": by default a device rounds float32 to 10 bits of mantissa (TF32) before it multiplies.
    scores = tl.dot(q_latents, tl.trans(latents), input_precision="ieee")
    if ROPE_DIM > 0:
        elements = LATENT_DIM + tl.arange(0, BLOCK_P)
        pointers = cache + slots[:, None] + elements[None, :] * cache_strides[3]
        ropes = load_part(pointers, ROPE_DIM, BLOCK_P)
        scores = tl.dot(q_ropes, tl.trans(ropes), scores, input_precision="ieee")
    if cap_scale is not None:
        scores = tanh(scores * cap_scale)
    if slopes is not None:
        distances = (positions[None, :] - row_positions[:, None]).to(tl.float32)
        scores = scores * scale + slopes[:, None] * distances
        scale = 1.0
    visible = positions[None, :] <= row_positions[:, None]
    if window is not None:
        visible = visible & (positions[None, :] > row_positions[:, None] - window)
    scores = tl.where(visible, scores, float("-inf"))

    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    # A row may have seen nothing yet, and -inf - -inf is NaN.
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    # The scale goes in here, where it is one fused multiply-add an element.
    weights = tl.exp2(scores * scale - finite[:, None])
    shrink = tl.exp2(maximum - finite)
    total = total * shrink + tl.sum(weights, 1)
    sums = sums * shrink[:, None]
    sums = tl.dot(weights.to(latents.dtype), latents, sums, input_precision="ieee")
    return new_maximum, total, sums


@triton.jit(do_not_specialize=["window", "num_sequences", "table_stride"])
def mla_kernel(  # noqa: PLR0915 - one program from its number to its store
    q,
    cache,
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
    cache_strides,
    NUM_HEADS: tl.constexpr,
    HEADS_PART: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SIGN: tl.constexpr,
):
    """The attention of one part of the queries by some of the heads over one run of the tokens.

    q: `[T, Hq, R + P]`; cache: `[N, 1, B, R + P]`, of q's dtype; any strides, as tuples.
    block_tables: `[S, table_stride] i32`; query_start: `[S + 1] i32`; seq_lens: `[S] i32`.
    scale, cap_scale, alibi_slopes, sinks, window, SIGN: as in `paged_attention_kernel`.
    out: `[T, Hq, NUM_SPLITS, R]`, contiguous, of any float dtype.
    log_sums: `[T, Hq, NUM_SPLITS] fp32`, to the base 2, -inf where a split has no tokens (its out
    is not written then); None with one split.
    LATENT_DIM, ROPE_DIM: R and P, padded to BLOCK_R and BLOCK_P. HEADS_PART: heads that one program
    has. MIN_SPLIT: tokens below which a run is not cut further.

    Grid: `((T // BLOCK_Q + S) * ceil(NUM_HEADS / HEADS_PART), NUM_SPLITS)` with
    BLOCK_Q = BLOCK_M // HEADS_PART.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS_PART
    HEAD_PARTS: tl.constexpr = (NUM_HEADS + HEADS_PART - 1) // HEADS_PART
    part = tl.program_id(0) // HEAD_PARTS
    first_head = tl.program_id(0) % HEAD_PARTS * HEADS_PART
    split = tl.program_id(1)

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
    queries = first_query + rows // HEADS_PART
    heads = first_head + rows % HEADS_PART
    row_exists = (rows < BLOCK_Q * HEADS_PART) & (queries < num_tokens) & (heads < NUM_HEADS)
    # What rows share stays apart from what depends on the row's number alone: their sum would be 16
    # addresses a thread that wait in registers while the tiles go by.
    first_output = ((first_token + first_query).to(tl.int64) * NUM_HEADS + first_head) * NUM_SPLITS
    first_output += split
    row_outputs = (rows // HEADS_PART * NUM_HEADS + rows % HEADS_PART) * NUM_SPLITS

    key_start = 0
    if window is not None:
        key_start = tl.maximum(first_position + 1 - window, 0)
    key_end = last_position + 1
    if NUM_SPLITS > 1:
        run = tl.cdiv(tl.cdiv(key_end - key_start, NUM_SPLITS), BLOCK_N) * BLOCK_N
        run = tl.maximum(run, MIN_SPLIT)
        key_start += split * run
        key_end = tl.minimum(key_end, key_start + run)
        if key_start >= key_end:
            nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            tl.store(log_sums + first_output + row_outputs, nothing, mask=row_exists)
            return

    elements = tl.arange(0, BLOCK_R)
    element_exists = row_exists[:, None] & (elements[None, :] < LATENT_DIM)
    tokens = (first_token + queries).to(tl.int64)
    q += (tokens * q_strides[0] + heads.to(tl.int64) * q_strides[1])[:, None]
    q_latents = tl.load(q + elements[None, :] * q_strides[2], mask=element_exists, other=0.0)
    if SIGN != 1:
        q_latents = (q_latents.to(tl.float32) * SIGN).to(q_latents.dtype)
    q_ropes = q_latents
    if ROPE_DIM > 0:
        rope_elements = tl.arange(0, BLOCK_P)
        pointers = q + (LATENT_DIM + rope_elements)[None, :] * q_strides[2]
        mask = row_exists[:, None] & (rope_elements[None, :] < ROPE_DIM)
        q_ropes = tl.load(pointers, mask=mask, other=0.0)
        if SIGN != 1:
            q_ropes = (q_ropes.to(tl.float32) * SIGN).to(q_ropes.dtype)
    # Rows that do not exist see what the last one sees, so that none of their numbers is special.
    row_positions = tl.minimum(first_position + rows // HEADS_PART, last_position)

    block_table = block_tables + sequence.to(tl.int64) * table_stride
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=row_exists, other=0.0)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    if sinks is not None:
        # A sink is a score that was seen before all others, of a V of zeros.
        maximum = tl.load(sinks + heads, mask=row_exists, other=0.0)
        total += 1.0
    sums = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    for tile_start in tl.range(key_start, key_end, BLOCK_N):
        maximum, total, sums = attend_latents(
            q_latents,
            q_ropes,
            maximum,
            total,
            sums,
            tile_start,
            row_positions,
            key_end,
            cache,
            block_table,
            cache_strides,
            scale,
            cap_scale,
            slopes,
            window,
            LATENT_DIM,
            ROPE_DIM,
            BLOCK_SIZE,
            BLOCK_R,
            BLOCK_P,
            BLOCK_N,
        )

    # A row may see none of this split's tokens.
    divisor = tl.where(total == 0.0, 1.0, total)
    result = sums * (1.0 / divisor)[:, None]
    pointers = out + first_output * LATENT_DIM
    pointers += row_outputs[:, None].to(tl.int64) * LATENT_DIM + elements[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=element_exists)
    if NUM_SPLITS > 1:
        # Not of `total > 0`: a NaN is to stay one.
        log_sum = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(log_sums + first_output + row_outputs, log_sum, mask=row_exists)
