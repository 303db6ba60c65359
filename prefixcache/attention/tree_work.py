"""The work list of `tree_attention`: which keys and which queries each program takes.

Owns the arrays and how they follow from a batch, its shared runs and the tiles. numpy only; made
once a step, for all layers.

Every sequence's keys are cut into segments: the shared runs, with the queries of all sequences that
have them, and each sequence's private rest. A segment with few queries goes to the narrow tiles,
any other to the wide ones: a few rows in a wide tile would cost registers, and so bandwidth. It is
cut into items by queries, as many as a tile has rows for, and by keys, so that the items are about
as many as the device can run at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.shared_prefix import Ints, SharedPrefix

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ItemLimits:
    """How far the segments of one launch are cut."""

    num_queries: int
    """Of an item at most."""
    key_step: int
    """Items begin at multiples of it after their segment's first key."""
    min_keys: int
    """Below which keys are not cut further; a multiple of `key_step`."""
    num_items: int
    """That there should be at least, to keep the device busy."""


@dataclass(frozen=True, slots=True)
class TreeWork:
    """W items of the narrow and of the wide tiles, Q query tokens (all of the batch), P parts."""

    narrow_items: Ints
    """`[Wn, 7]`: sequence, first key, end of the keys that all its queries see, end of its keys,
    first and end query, first slot; see `tree_attention_kernel`."""
    wide_items: Ints
    """`[Ww, 7]`."""
    query_tokens: Ints
    """`[Q]` rows of q, those that share before those that do not."""
    positions: Ints
    """`[Q]` where they stand in their sequences."""
    part_starts: Ints
    """`[T + 1]` where each token's parts start in `part_slots`."""
    part_slots: Ints
    """`[P]` the slots of each token's parts, which are 0..P-1 in some order."""


def make_work(
    batch: AttentionBatch,
    plan: SharedPrefix,
    max_narrow_queries: int,
    narrow: ItemLimits,
    wide: ItemLimits,
) -> TreeWork:
    """The items of all keys of all queries of a batch.

    max_narrow_queries: of a segment that goes to the narrow tiles.
    """
    query_lens = np.diff(batch.query_start).astype(np.int64)
    alone = np.repeat(plan.private_starts == 0, query_lens).nonzero()[0]
    query_tokens = np.concatenate([plan.query_tokens, alone])
    owners = np.searchsorted(batch.query_start, query_tokens, side="right") - 1
    positions = query_tokens + (batch.seq_lens - batch.query_start[1:])[owners]

    (first_queries,) = np.diff(owners, prepend=-1).nonzero()
    sequences = owners[first_queries]
    segments = np.concatenate(
        [
            [
                plan.run_sequences,
                plan.run_starts,
                plan.run_ends,
                plan.run_first_queries,
                plan.run_end_queries,
            ],
            [
                sequences,
                plan.private_starts[sequences],
                batch.seq_lens[sequences],
                first_queries,
                first_queries + query_lens[sequences],
            ],
        ],
        axis=1,
    )
    is_narrow = segments[4] - segments[3] <= max_narrow_queries
    narrow_items = _cut(segments[:, is_narrow], positions, narrow)
    wide_items = _cut(segments[:, ~is_narrow], positions, wide)

    first, end = np.concatenate([narrow_items[4:6], wide_items[4:6]], axis=1)
    num_parts = np.cumsum(end - first)
    slots = num_parts - (end - first)
    queries = np.arange(num_parts[-1]) + np.repeat(first - slots, end - first)
    tokens = query_tokens[queries]
    counts = np.bincount(tokens, minlength=batch.query_start[-1])
    num_narrow = narrow_items.shape[1]
    return TreeWork(
        narrow_items=_as_rows(narrow_items, slots[:num_narrow]),
        wide_items=_as_rows(wide_items, slots[num_narrow:]),
        query_tokens=query_tokens.astype(np.int32),
        positions=positions.astype(np.int32),
        part_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        part_slots=tokens.argsort(kind="stable").astype(np.int32),
    )


def _cut(segments: Columns, positions: Columns, limits: ItemLimits) -> Columns:
    """`[5, n]` (sequence, start, end, first and end query) to `[6, W]`, without the slots."""
    sequences, starts, ends, first_queries, end_queries = segments
    counts = -(-(end_queries - first_queries) // limits.num_queries)
    source, number = _repeat(counts)
    first_queries = first_queries[source] + number * limits.num_queries
    end_queries = np.minimum(end_queries[source], first_queries + limits.num_queries)
    # Queries stand in order: the first sees the least, the last the most. Shared runs end before
    # any of them.
    ends = np.minimum(ends[source], positions[end_queries - 1] + 1)
    sequences, starts = sequences[source], starts[source]

    keys = -(-int((ends - starts).sum()) // limits.num_items)
    keys = max(limits.min_keys, -(-keys // limits.key_step) * limits.key_step)
    source, number = _repeat(-(-(ends - starts) // keys))
    starts = starts[source] + number * keys
    ends = np.minimum(ends[source], starts + keys)
    first_queries, end_queries = first_queries[source], end_queries[source]
    seen_by_all = np.clip(positions[first_queries] + 1, starts, ends)
    return np.stack([sequences[source], starts, seen_by_all, ends, first_queries, end_queries])


def _repeat(counts: Columns) -> tuple[Columns, Columns]:
    """Index i `counts[i]` times, and the number of each time."""
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - (np.cumsum(counts) - counts)[source]


def _as_rows(items: Columns, slots: Columns) -> Ints:
    return np.ascontiguousarray(np.vstack([items, slots]).T, dtype=np.int32)
