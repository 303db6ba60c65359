"""Appends as columns and as rows are one and the same."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.append_batch import AppendBatch, AppendedBatch
from prefixcache.core.sequence import AppendRow
from prefixcache.types import AppendResult, BlockCopy, ResultCode
from tests.core.manager import ONE, Manager, T, U, forked, image
from tests.support.invariants import check_invariants, snapshot


def plain(row: AppendRow) -> tuple[object, ...]:
    return (*row[:2], row.token_ids.tolist(), *row[3:])


@pytest.mark.parametrize("lengths", [[1], [0], [1, 1, 1], [0, 5, 0, 2], [3, 0]])
def test_a_batch_gives_back_the_rows_that_it_was_made_of(lengths: list[int]) -> None:
    rows = [
        AppendRow(
            2**64 - 1 - index,
            2**32 - 1 - index,
            np.arange(10 * index, 10 * index + length, dtype=np.uint32),
            min(index, length),
            index % 2,
            *([image("A", 6, 1)] if index == 2 else []),
        )
        for index, length in enumerate(lengths)
    ]
    assert list(map(plain, AppendBatch.of(rows).rows())) == list(map(plain, rows))


def test_token_ids_of_another_type_or_with_gaps_become_a_column() -> None:
    rows = [AppendRow(1, 0, np.arange(6)[::2]), AppendRow(2, 0, np.arange(3, dtype=np.uint32))]
    assert AppendBatch.of(rows).token_ids == np.array([0, 2, 4, 0, 1, 2], dtype="<u4").tobytes()


@pytest.mark.parametrize("left_out", ["num_kv_valid", "num_lookahead_tokens"])
def test_a_column_that_is_left_out_is_one_of_zeros(left_out: str) -> None:
    rows = [AppendRow(index, 3, np.arange(2, dtype=np.uint32)) for index in range(3)]
    batch = AppendBatch.of(rows)._replace(**{left_out: b""})
    assert list(map(plain, batch.rows())) == list(map(plain, rows))


@pytest.mark.parametrize(
    ("column", "data"),
    [
        ("start_positions", b""),
        ("num_tokens", bytes(4)),
        ("num_tokens", np.array([2, 2], dtype="<u4").tobytes()),
        ("num_kv_valid", bytes(4)),
        ("num_lookahead_tokens", bytes(12)),
        ("token_ids", bytes(8)),
        ("token_ids", bytes(13)),
        ("sequence_ids", bytes(15)),
        ("sequence_ids", bytes(24)),
    ],
)
def test_columns_that_do_not_fit_together_change_nothing(column: str, data: bytes) -> None:
    manager = Manager(10)
    held = [manager.allocate(T(3)), manager.allocate(T(4))]
    rows = [
        AppendRow(one.sequence_id, one.num_tokens, np.array([5, 6, 7][:count], np.uint32))
        for one, count in zip(held, (1, 2), strict=True)
    ]
    batch = AppendBatch.of(rows)._replace(**{column: data})
    before = snapshot(manager.sequences)
    with pytest.raises(ValueError):
        manager.sequences.rows.append(ONE, batch)
    assert snapshot(manager.sequences) == before


@pytest.mark.parametrize(
    "results",
    [
        [AppendResult(ResultCode.OK)],
        [AppendResult(ResultCode.NO_ROOM), AppendResult(ResultCode.OK, (7, 2))],
        [
            AppendResult(ResultCode.OK, (3,), (BlockCopy(1, 2),)),
            AppendResult(ResultCode.BUSY),
            AppendResult(ResultCode.OK, (), (BlockCopy(4, 5),)),
            AppendResult(ResultCode.OK, (9, 8, 6)),
        ],
    ],
)
def test_what_became_of_a_batch_gives_back_the_results_of_its_rows(
    results: list[AppendResult],
) -> None:
    appended = AppendedBatch.of(results, 11)
    assert appended.results() == results
    assert appended.num_blocks_free == 11


def test_rows_of_every_kind_in_one_batch_are_as_they_are_alone() -> None:
    """Plain ones, refused ones, one with a copy, one with an image, one that is a repeat."""
    outcomes = []
    for together in (True, False):
        manager = Manager(40)
        _, child = forked(manager)
        held = [manager.allocate([*T(5), index]) for index in range(3)]
        repeated = AppendRow(held[2].sequence_id, 6, np.array(U(2), dtype=np.uint32))
        manager.sequences.rows.append(ONE, AppendBatch.of([repeated]))
        tokens = np.array(U(3), dtype=np.uint32)
        rows = [
            AppendRow(held[0].sequence_id, 6, tokens),
            AppendRow(held[1].sequence_id + 1, 6, tokens),
            AppendRow(child.sequence_id, 6, tokens),
            AppendRow(held[1].sequence_id, 6, tokens, 1, 2, image("A", 6, 2)),
            repeated,
            AppendRow(manager.allocate(T(1)).sequence_id, 1, np.empty(0, dtype=np.uint32)),
        ]
        batches = [rows] if together else [[row] for row in rows]
        appended = [manager.sequences.rows.append(ONE, AppendBatch.of(batch)) for batch in batches]
        check_invariants(manager.sequences)
        assert appended[-1].num_blocks_free == manager.pool.num_free
        outcomes.append([result for batch in appended for result in batch.results()])
    assert outcomes[0] == outcomes[1]
    ok = ResultCode.OK
    assert [result.code for result in outcomes[0]] == [ok, ResultCode.NOT_FOUND, ok, ok, ok, ok]
    assert outcomes[0][2].copies
