"""Append of many sequences as columns: what is asked for, and what became of it.

Values only. A row of them is an `AppendRow` and an `AppendResult`, which the core makes of the few
rows that are not plain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
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
)


class AppendBatch(NamedTuple):
    """Rows of distinct sequences, in the order in which they are appended.

    Columns of little-endian integers, as they stand on the wire. sequence_ids: 8 bytes a row.
    start_positions, num_tokens, num_kv_valid and num_lookahead_tokens: 4 bytes a row; the last two
    may be empty, for zeros. token_ids: 4 bytes each, row after row. extra_keys: by row, of those
    that have any.
    """

    sequence_ids: bytes
    start_positions: bytes
    num_tokens: bytes
    token_ids: bytes
    num_kv_valid: bytes
    num_lookahead_tokens: bytes
    extra_keys: Mapping[int, ExtraKeys]

    @classmethod
    def of(cls, rows: Sequence[AppendRow]) -> AppendBatch:
        return cls(
            np.array([row.sequence_id for row in rows], dtype="<u8").tobytes(),
            _column32([row.start_position for row in rows]),
            _column32([len(row.token_ids) for row in rows]),
            b"".join(_column32(row.token_ids) for row in rows),
            _column32([row.num_kv_valid for row in rows]),
            _column32([row.num_lookahead_tokens for row in rows]),
            {index: row.extra_keys for index, row in enumerate(rows) if row.extra_keys},
        )

    def rows(self) -> list[AppendRow]:
        """Raises ValueError if the columns do not fit together."""
        sequence_ids = np.frombuffer(self.sequence_ids, dtype="<u8").tolist()
        token_ids = np.frombuffer(self.token_ids, dtype="<u4")
        zeros = bytes(len(self.start_positions))
        starts, lengths, valids, lookaheads = (
            np.frombuffer(column, dtype="<u4").tolist()
            for column in (
                self.start_positions,
                self.num_tokens,
                self.num_kv_valid or zeros,
                self.num_lookahead_tokens or zeros,
            )
        )
        if sum(lengths) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens for rows of {sum(lengths)}")
        ends = accumulate(lengths)
        rows: list[AppendRow] = []
        columns = zip(sequence_ids, starts, lengths, ends, valids, lookaheads, strict=True)
        for index, (sequence_id, start, length, end, valid, lookahead) in enumerate(columns):
            keys = self.extra_keys.get(index, NO_EXTRA_KEYS)
            row_tokens = token_ids[end - length : end]
            rows.append(AppendRow(sequence_id, start, row_tokens, valid, lookahead, keys))
        return rows


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


def _column32(values: npt.ArrayLike) -> bytes:
    return np.asarray(values, dtype="<u4").tobytes()


def _column(values: Iterable[int]) -> array[int]:
    return array("I", values)
