"""Attention of sequences that share blocks: each shared run is streamed once for all of them.

The queries of all sequences stand in one matrix, in the order of the plan, where those of a run
are neighbours: a tile of the run is one matrix product with them, and goes into their running
softmax. What each sequence has alone goes into the same softmax afterwards, so that nothing is left
to join (ChunkAttention, arXiv 2402.15220, has both phases; Hydragen, 2402.05099, joins them by
their log-sum-exp).

Threads: pure but for reading the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.sequence_kv import KVReader
from prefixcache.attention.shared_prefix import SharedPrefix
from prefixcache.attention.streaming import MAX_SCORES, RunningSoftmax
from prefixcache.types import AttentionOptions


def attend_shared(
    q: torch.Tensor,
    reader: KVReader,
    batch: AttentionBatch,
    plan: SharedPrefix,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """The outputs of the plan's query tokens; the other rows of `out` stay as they are.

    q: `[T, Hq, D]`, out: `[T, Hq, Dv]`, both of any dtype. options: without a window.
    """
    sequences = np.searchsorted(batch.query_start, plan.query_tokens, side="right") - 1
    positions = plan.query_tokens + (batch.seq_lens - batch.query_start[1:])[sequences]
    tokens = torch.from_numpy(plan.query_tokens.astype(np.int64)).to(q.device)
    rows = RunningSoftmax(q[tokens], reader, positions, options)
    step = max(1, MAX_SCORES // (q.shape[1] * reader.tile_tokens))
    for sequence, start, end, first_query, end_query in _runs(plan):
        parts = _parts(rows, first_query, end_query, step)
        for tile in reader.tiles(batch.block_tables[sequence], start, end):
            for part in parts:
                part.take(tile, masked=False)
    (first_queries,) = np.diff(sequences, prepend=-1).nonzero()
    for sequence, first in zip(sequences[first_queries], first_queries.tolist(), strict=True):
        context, seq_len = int(batch.context_lens[sequence]), int(batch.seq_lens[sequence])
        parts = _parts(rows, first, first + seq_len - context, step)
        start = int(plan.private_starts[sequence])
        for tile in reader.tiles(batch.block_tables[sequence], start, seq_len):
            for part in parts:
                part.take(tile, masked=tile.end > context + 1)
    out[tokens] = rows.result().to(out.dtype)


def _runs(plan: SharedPrefix) -> Iterator[list[int]]:
    """Of each run: a sequence that has it, its first and end token, its first and end query."""
    columns = np.stack(
        [
            plan.run_sequences,
            plan.run_starts,
            plan.run_ends,
            plan.run_first_queries,
            plan.run_end_queries,
        ]
    )
    yield from columns.T.tolist()


def _parts(rows: RunningSoftmax, first: int, end: int, step: int) -> list[RunningSoftmax]:
    """Queries [first, end), up to `step` of them at a time, which bounds the scores held."""
    return [rows.part(query, min(query + step, end)) for query in range(first, end, step)]
