"""Join attention outputs over separate sets of keys by the log-sum-exp of their scores.

One program a row; nothing here knows where the parts come from.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    parts,
    log_sums,
    out,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    sinks=None,
    NUM_HEADS: tl.constexpr = 1,
):
    """out[row] = sum over parts of parts[row, part] * 2 ** log_sums[row, part], normalised.

    parts: `[rows, NUM_PARTS, D] fp32`, each normalised by itself; log_sums: `[rows, NUM_PARTS]
    fp32`, to the base 2, -inf for a part without keys, whose output is not read. out: `[rows, D]`
    of any float dtype; zeros where no part has keys. All contiguous; NUM_PARTS is a power of two.
    sinks: `[NUM_HEADS] fp32`, to the base 2; row r has that of head r % NUM_HEADS, which is one
    more log sum, of zeros. None: there are none.

    Grid: `(rows,)`.
    """
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, NUM_PARTS)
    elements = tl.arange(0, BLOCK_D)
    log_sum = tl.load(log_sums + row * NUM_PARTS + numbers)
    has_keys = log_sum != float("-inf")  # a NaN has
    maximum = tl.max(log_sum, 0)
    if sinks is not None:
        sink = tl.load(sinks + row % NUM_HEADS)
        maximum = tl.maximum(maximum, sink)
    # -inf - -inf is NaN.
    maximum = tl.where(maximum > float("-inf"), maximum, 0.0)
    weights = tl.exp2(log_sum - maximum)
    total = tl.sum(weights, 0)
    if sinks is not None:
        total += tl.exp2(sink - maximum)
    total = tl.where(total > 0.0, total, 1.0)

    pointers = parts + (row * NUM_PARTS + numbers[:, None]) * HEAD_DIM + elements[None, :]
    mask = has_keys[:, None] & (elements[None, :] < HEAD_DIM)
    values = tl.load(pointers, mask=mask, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / total
    pointers = out + row * HEAD_DIM + elements
    tl.store(pointers, result.to(out.dtype.element_ty), mask=elements < HEAD_DIM)
