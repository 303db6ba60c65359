"""Which block runs the sequences of a batch have in common at their start, and who reads them.

Sequences that share a prefix have equal block ids at the same places of their block tables. Read
once for all of them, a run of such blocks costs the memory traffic of one sequence, and its
queries become rows of one matrix (ChunkAttention, arXiv 2402.15220; Hydragen, 2402.05099). What is
shared is a trie: all sequences a system prompt, some of them a conversation as well (DeFT,
2404.00242; FastTree; the cascade of FlashInfer, whose levels the caller has to give).

Rows are sorted, so that those with a common prefix are neighbours; the lengths of the neighbours'
common prefixes then are the trie (as those of sorted suffixes are a suffix tree: Kasai et al., CPM
2001). Only prefixes count: equal ids further on, behind different ones, are a coincidence.

Pure; no torch. Planned once a step and not once a layer: see `AttentionBatch.shared_prefix`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from prefixcache.attention.batch import AttentionBatch

Ints = npt.NDArray[np.int32]

MAX_QUERY_TOKENS = 16
"""New tokens of a sequence up to which it takes part: more are bound by arithmetic, not reading."""
MIN_SAVED_TOKENS = 64
"""Tokens that a run must save for each of its query tokens, which have one part more to compute and
join: on CPU (measured) as long as reading about 64 tokens, on a GPU 8 to 32 by bytes."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The runs that are worth reading once. R runs, S sequences of the batch, Q query tokens.

    Every key that a sequence's queries see is in exactly one place: in the runs that have the
    sequence's queries, which together cover tokens 0 up to its `private_starts`, or in its private
    rest from there on. Runs are whole blocks before the first new token of each of their
    sequences, so that every query sees all of a run; only the private rests need a causal mask.
    All arrays are read-only.
    """

    run_sequences: Ints
    """`[R]` a sequence whose block table names the run's blocks; all others of the run agree."""
    run_starts: Ints
    """`[R]` the first token of each run; a multiple of the block size."""
    run_ends: Ints
    """`[R]` the end of it, also a multiple. A run stands before those that continue it."""
    run_first_queries: Ints
    """`[R]` where in `query_tokens` the run's queries start."""
    run_end_queries: Ints
    """`[R]` where they end. Two runs' queries are the one's among the other's, or apart."""
    query_tokens: Ints
    """`[Q]` the tokens (rows of q) of all sequences that have a run, each once; those of a
    sequence together and in order."""
    private_starts: Ints
    """`[S]` the first token of each sequence's private rest; 0 for one that shares no run."""
    saved_tokens: int
    """Tokens whose K/V are read less than if each sequence read all of its own."""


def plan_shared_prefix(
    batch: AttentionBatch, block_size: int, min_saved_tokens: int = MIN_SAVED_TOKENS
) -> SharedPrefix | None:
    """The runs of a checked batch; None if there are none that save enough.

    min_saved_tokens: for each query token of a run. A run that saves less becomes a part of those
    that continue it, and where there are none, private.
    """
    tables = batch.block_tables
    if len(set(tables[:, :1].ravel().tolist())) == len(tables):
        return None
    query_lens = np.diff(batch.query_start)
    takes_part = (query_lens > 0) & (query_lens <= MAX_QUERY_TOKENS)
    (candidates,) = (takes_part & (batch.context_lens >= block_size)).nonzero()
    if len(candidates) < 2:
        return None
    # A block with a new token is private, and so are unused entries, whatever they hold.
    num_blocks = batch.context_lens[candidates] // block_size
    width = int(num_blocks.max())
    keys = tables[candidates, :width]
    common_width = int(num_blocks.min())
    unused = np.arange(common_width, width, dtype=np.int32) >= num_blocks[:, None]
    np.copyto(keys[:, common_width:], -1, where=unused)
    order = keys.view(f"V{keys.itemsize * width}").ravel().argsort()
    common = _common_prefixes(keys[order], num_blocks[order])
    if not any(common):
        return None
    candidates = candidates[order]
    queries = query_lens[candidates].tolist()
    runs, covered = _choose(_intervals(common), queries, min_saved_tokens / block_size)
    if not runs:
        return None
    return _as_arrays(runs, covered, candidates, batch, block_size)


def _common_prefixes(rows: Ints, num_blocks: npt.NDArray[np.int32]) -> list[int]:
    """How many leading blocks each of the sorted rows has in common with the one before."""
    differs = rows[1:] != rows[:-1]
    first = differs.argmax(axis=1)
    first[~differs[np.arange(len(first)), first]] = rows.shape[1]
    common: list[int] = np.minimum(first, np.minimum(num_blocks[1:], num_blocks[:-1])).tolist()
    return common


def _intervals(common: list[int]) -> list[tuple[int, int, int]]:
    """The trie's inner nodes as (low, high, depth): rows [low, high) have `depth` blocks in common.

    A node comes before the nodes inside it.
    """
    closed = []
    still_open: list[tuple[int, int]] = []  # (low, depth), ever deeper
    for row, depth in enumerate([*common, 0]):
        low = row
        while still_open and still_open[-1][1] > depth:
            low, closed_depth = still_open.pop()
            closed.append((low, row + 1, closed_depth))
        if depth > (still_open[-1][1] if still_open else 0):
            still_open.append((low, depth))
    return closed[::-1]


def _choose(
    intervals: list[tuple[int, int, int]], queries: list[int], min_saved_blocks: float
) -> tuple[list[int], list[int]]:
    """The runs worth it, and how many blocks of each row they cover.

    A run is four numbers, one after another: blocks [start, end) of the rows [low, high).
    """
    runs: list[int] = []
    covered = [0] * len(queries)
    end_queries = [0, *accumulate(queries)]
    for low, high, end in intervals:
        start = covered[low]
        num_queries = end_queries[high] - end_queries[low]
        if (high - low - 1) * (end - start) >= min_saved_blocks * num_queries:
            runs += (low, high, start, end)
            covered[low:high] = [end] * (high - low)
    return runs, covered


def _as_arrays(
    runs: list[int],
    covered: list[int],
    sequences: npt.NDArray[np.int64],
    batch: AttentionBatch,
    block_size: int,
) -> SharedPrefix:
    """runs, covered: of `_choose`, whose rows are the given sequences."""
    low, high, start, end = np.array(runs, np.int32).reshape(-1, 4).T
    private_starts = np.array(covered, np.int32) * np.int32(block_size)
    of_all = np.zeros_like(batch.seq_lens)
    of_all[sequences] = private_starts
    first_tokens = batch.query_start[sequences]
    query_lens = (batch.query_start[sequences + 1] - first_tokens) * (private_starts > 0)
    end_queries = query_lens.cumsum(dtype=np.int32)
    first_queries = end_queries - query_lens
    query_tokens = np.arange(end_queries[-1], dtype=np.int32)
    query_tokens += (first_tokens - first_queries).repeat(query_lens)
    return SharedPrefix(
        run_sequences=_read_only(sequences[low].astype(np.int32)),
        run_starts=_read_only(start * np.int32(block_size)),
        run_ends=_read_only(end * np.int32(block_size)),
        run_first_queries=_read_only(first_queries[low]),
        run_end_queries=_read_only(end_queries[high - 1]),
        query_tokens=_read_only(query_tokens),
        private_starts=_read_only(of_all),
        saved_tokens=int(((high - low - 1) * (end - start)).sum()) * block_size,
    )


def _read_only(array: Ints) -> Ints:
    array.flags.writeable = False
    return array
