"""Append of many sequences as columns: what is asked for, and what became of it.

Values only. A row of them is an `AppendRow` and an `AppendResult`, which the core makes of the few
rows that are not plain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.core.sequence import AppendRow
from prefixcache.types import (
    NO_EXTRA_KEYS,
    AppendResult,
    BlockCopy,
    ExtraKeys,
    ResultCode,
    TokenIds,
)


class AppendBatch(NamedTuple):
    """Rows of distinct sequences, in the order in which they are appended.

    sequence_ids: `[R] uint64`. start_positions, num_tokens, num_kv_valid and num_lookahead_tokens:
    `[R] uint32`. token_ids: `[sum(num_tokens)] uint32`, row after row. All are contiguous.
    extra_keys: by row, of those that have any.
    """

    sequence_ids: npt.NDArray[np.uint64]
    start_positions: npt.NDArray[np.uint32]
    num_tokens: npt.NDArray[np.uint32]
    token_ids: TokenIds
    num_kv_valid: npt.NDArray[np.uint32]
    num_lookahead_tokens: npt.NDArray[np.uint32]
    extra_keys: Mapping[int, ExtraKeys]

    @classmethod
    def of(cls, rows: Sequence[AppendRow]) -> AppendBatch:
        return cls(
            np.array([row.sequence_id for row in rows], dtype=np.uint64),
            np.array([row.start_position for row in rows], dtype=np.uint32),
            np.array([len(row.token_ids) for row in rows], dtype=np.uint32),
            np.concatenate([row.token_ids for row in rows]).astype(np.uint32, copy=False),
            np.array([row.num_kv_valid for row in rows], dtype=np.uint32),
            np.array([row.num_lookahead_tokens for row in rows], dtype=np.uint32),
            {index: row.extra_keys for index, row in enumerate(rows) if row.extra_keys},
        )

    def rows(self) -> Iterator[AppendRow]:
        lengths = self.num_tokens.tolist()
        columns = zip(
            self.sequence_ids.tolist(),
            self.start_positions.tolist(),
            lengths,
            accumulate(lengths),
            self.num_kv_valid.tolist(),
            self.num_lookahead_tokens.tolist(),
            strict=True,
        )
        for index, (sequence_id, start, length, end, valid, lookahead) in enumerate(columns):
            token_ids = self.token_ids[end - length : end]
            keys = self.extra_keys.get(index, NO_EXTRA_KEYS)
            yield AppendRow(sequence_id, start, token_ids, valid, lookahead, keys)


class AppendedBatch(NamedTuple):
    """What became of each row, as columns of 4 bytes.

    result_codes, num_new_blocks and num_copies have an entry a row. new_block_ids, copy_sources and
    copy_destinations are those of the rows, row after row. num_blocks_free: after the batch.
    """

    result_codes: array[int]
    num_new_blocks: array[int]
    new_block_ids: array[int]
    num_copies: array[int]
    copy_sources: array[int]
    copy_destinations: array[int]
    num_blocks_free: int

    @classmethod
    def of(cls, results: Sequence[AppendResult], num_blocks_free: int) -> AppendedBatch:
        copies = [copy for result in results for copy in result.copies]
        return cls(
            _column(result.code for result in results),
            _column(len(result.new_block_ids) for result in results),
            _column(block for result in results for block in result.new_block_ids),
            _column(len(result.copies) for result in results),
            _column(copy.source for copy in copies),
            _column(copy.destination for copy in copies),
            num_blocks_free,
        )

    def results(self) -> list[AppendResult]:
        new_blocks = iter(self.new_block_ids)
        copies = map(BlockCopy, self.copy_sources, self.copy_destinations)
        return [
            AppendResult(
                ResultCode(code),
                tuple(islice(new_blocks, num_new)),
                tuple(islice(copies, num_copied)),
            )
            for code, num_new, num_copied in zip(
                self.result_codes, self.num_new_blocks, self.num_copies, strict=True
            )
        ]


def _column(values: Iterable[int]) -> array[int]:
    return array("I", values)
