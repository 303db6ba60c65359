"""Random sequences that share the blocks at their start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from prefixcache.attention.batch import PrefixSharing, make_batch
from prefixcache.storage.kv_cache import KVCache
from tests.attention.paged_cases import PagedCase


@dataclass(frozen=True, slots=True)
class Sharing:
    """A sequence starts with the first `num_blocks` of sequence `parent`, which stands before it.

    It gets as many as both have before their new tokens.
    """

    parent: int
    num_blocks: int


def share(
    case: PagedCase,
    sharings: Sequence[Sharing | None],
    prefix_sharing: PrefixSharing = PrefixSharing.ALWAYS,
) -> PagedCase:
    """`case` with other block tables: one entry of `sharings` for each sequence.

    The blocks that take nobody's place hold poison, like all unused ones.
    """
    tables = [table.copy() for table in case.tables]
    num_whole = case.batch.context_lens // case.block_size
    for row, sharing in enumerate(sharings):
        if sharing is not None:
            assert sharing.parent < row
            shared = min(sharing.num_blocks, num_whole[row], num_whole[sharing.parent])
            tables[row][:shared] = tables[sharing.parent][:shared]
    _poison_blocks(case.cache, _ids(case.tables) - _ids(tables), _ids(case.tables))
    queries = np.diff(case.batch.query_start).tolist()
    batch = make_batch(
        tables,
        case.batch.context_lens.tolist(),
        queries,
        [0] * len(tables),
        case.block_size,
    )
    return replace(case, batch=replace(batch, prefix_sharing=prefix_sharing), tables=tables)


def with_sharing(case: PagedCase, prefix_sharing: PrefixSharing) -> PagedCase:
    return replace(case, batch=replace(case.batch, prefix_sharing=prefix_sharing))


def sharings(num_sequences: int) -> st.SearchStrategy[list[Sharing | None]]:
    """Any tries."""
    return st.tuples(
        *(
            st.none() | st.builds(Sharing, st.integers(0, row - 1), st.integers(1, 12))
            if row
            else st.none()
            for row in range(num_sequences)
        )
    ).map(list)


def _ids(tables: Sequence[npt.NDArray[np.int32]]) -> set[int]:
    return {block for table in tables for block in table.tolist()}


def _poison_blocks(cache: KVCache, blocks: set[int], ever_used: set[int]) -> None:
    tensors = [cache.keys, cache.values]
    if cache.scales is not None:
        tensors += [cache.scales.keys, cache.scales.values]
    spare = next(block for block in range(len(cache.keys)) if block not in ever_used)
    for tensor in tensors:
        for block in blocks:
            # Scales of a whole block are expanded views.
            target, source = tensor[block], tensor[spare]
            if 0 in target.stride():
                target, source = target[:1, :1], source[:1, :1]
            target.copy_(source)
