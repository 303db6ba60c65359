"""Copy whole blocks, all layers at once, as words without a type."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["source_ids", "destination_ids"])
def copy_blocks_kernel(
    sources,
    destinations,
    source_ids,
    destination_ids,
    block_words,
    TILE_WORDS: tl.constexpr,
):
    """Block destination_ids[i] of `destinations` becomes block source_ids[i] of `sources`.

    sources, destinations: `[blocks, block_words]`, contiguous, of one integer dtype, perhaps the
    same memory; then no block may be both read and written, for pairs run in any order.
    source_ids, destination_ids: `[pairs] int64`.

    Grid: `(pairs, ceil(block_words / TILE_WORDS))`.
    """
    pair = tl.program_id(0)
    words = tl.program_id(1).to(tl.int64) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    inside = words < block_words
    source = sources + tl.load(source_ids + pair) * block_words
    destination = destinations + tl.load(destination_ids + pair) * block_words
    tl.store(destination + words, tl.load(source + words, mask=inside), mask=inside)
