"""Join the parts of each query that the items of a work list left, however many it has.

`combine` is for parts that stand beside each other and are as many for all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_combine_kernel(
    parts,
    log_sums,
    out,
    part_starts,
    part_slots,
    sinks,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[token, head] = sum over its parts of parts[part] * 2 ** log_sums[part], normalised.

    parts: `[slots, Hq, D] fp32`, each normalised by itself; log_sums: `[slots, Hq] fp32`, to the
    base 2, -inf for one without keys. part_starts: `[T + 1] i32`: the parts of token t have the
    slots part_slots[part_starts[t] : part_starts[t + 1]]. out: `[T, Hq, D]` of any float dtype; all
    contiguous. sinks: `[Hq] fp32` to the base 2, or None: one more log sum, of zeros.

    Grid: `(T, Hq)`. BLOCK_P: parts that are loaded at a time.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    elements = tl.arange(0, BLOCK_D)
    start = tl.load(part_starts + token)
    end = tl.load(part_starts + token + 1)
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if sinks is not None:
        maximum = tl.load(sinks + head)
        total += 1.0
    sums = tl.full((BLOCK_D,), 0.0, tl.float32)
    for first in tl.range(start, end, BLOCK_P):
        numbers = first + tl.arange(0, BLOCK_P)
        slots = tl.load(part_slots + numbers, mask=numbers < end, other=0).to(tl.int64)
        rows = slots * num_heads + head
        log_sum = tl.load(log_sums + rows, mask=numbers < end, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(log_sum, 0))
        # -inf - -inf is NaN.
        finite = tl.where(new_maximum > float("-inf"), new_maximum, 0.0)
        weights = tl.exp2(log_sum - finite)
        shrink = tl.exp2(maximum - finite)
        mask = (log_sum > float("-inf"))[:, None] & (elements[None, :] < HEAD_DIM)
        pointers = parts + rows[:, None] * HEAD_DIM + elements[None, :]
        values = tl.load(pointers, mask=mask, other=0.0)
        sums = sums * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        maximum = new_maximum
    result = sums / tl.where(total > 0.0, total, 1.0)
    pointers = out + (token.to(tl.int64) * num_heads + head) * HEAD_DIM + elements
    tl.store(pointers, result.to(out.dtype.element_ty), mask=elements < HEAD_DIM)
