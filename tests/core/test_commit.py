"""Commit: the client has written K/V of all layers itself, in part after calls of single layers."""

from __future__ import annotations

import pytest

from prefixcache.core.sequence import CommitRow
from prefixcache.errors import WrongPositionError
from prefixcache.types import CommitResult, ResultCode
from tests.core.manager import Manager, T, refused

OK = ResultCode.OK


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_commit_moves_the_counts_of_all_layers(num_layers: int) -> None:
    manager = Manager(4, num_layers=num_layers)
    held = manager.allocate(T(10))
    assert manager.commit(held, 3) == CommitResult(OK, 0)
    assert manager.record(held).computed == [3] * num_layers
    assert manager.commit(held, 9) == CommitResult(OK, 2)
    assert manager.record(held).computed == [9] * num_layers
    assert manager.hit(T(10)) == 8
    assert manager.sequences.stats().prefill_tokens_computed == 9


def test_a_commit_goes_on_where_the_layer_that_is_least_far_stands() -> None:
    manager = Manager(4, num_layers=3)
    held = manager.allocate(T(12))
    manager.end(manager.begin(0, held, num_tokens=9))
    manager.end(manager.begin(2, held, num_tokens=2))
    assert manager.record(held).computed == [9, 0, 2]
    assert manager.commit(held, 5) == CommitResult(OK, 1)
    assert manager.record(held).computed == [9, 5, 5]
    assert manager.commit(held) == CommitResult(OK, 3)
    assert manager.sequences.stats().prefill_tokens_computed == 12


def test_attention_goes_on_after_a_commit_and_a_commit_after_attention() -> None:
    manager = Manager(4, num_layers=2)
    held = manager.allocate(T(12))
    manager.commit(held, 5)
    manager.attend(held, num_tokens=2)
    assert manager.record(held).computed == [7, 7]
    manager.commit(held, 8)
    again = manager.sequences.running.begin_attention
    refused(manager, WrongPositionError, lambda: again(held.owner, 0, [held.sequence_id], [7], [1]))
    manager.attend(held)
    assert manager.hit(T(12)) == 11


def test_a_repeated_commit_is_answered_again_but_not_after_attention() -> None:
    manager = Manager(4, num_layers=2)
    held = manager.allocate(T(12))
    row = CommitRow(held.sequence_id, 0, 6)
    first, again = (manager.sequences.rows.commit(held.owner, [row])[0] for _ in range(2))
    assert first == again == CommitResult(OK, 1)
    manager.attend(held, num_tokens=1)
    assert manager.sequences.rows.commit(held.owner, [row]) == [
        CommitResult(ResultCode.WRONG_POSITION)
    ]


def test_the_recomputed_token_of_a_full_hit_is_committed_and_registers_nothing() -> None:
    manager = Manager(8, num_layers=2)
    manager.fill(T(8))
    held = manager.allocate(T(8))
    assert held.cached == 7
    assert manager.commit(held) == CommitResult(OK, 2)
    manager.append(held, [99])
    assert manager.commit(held) == CommitResult(OK, 2)
    assert manager.record(held).computed == [9, 9]


def test_a_batch_of_commits_has_a_result_a_row() -> None:
    manager = Manager(8, num_layers=3)
    short, long = manager.allocate(T(3)), manager.allocate(T(9))
    rows = [
        CommitRow(short.sequence_id, 0, 3),
        CommitRow(short.sequence_id, 3, 1),
        CommitRow(long.sequence_id, 0, 9),
        CommitRow(long.sequence_id, 0, 1),
    ]
    assert manager.sequences.rows.commit(short.owner, rows) == [
        CommitResult(OK, 0),
        CommitResult(ResultCode.BEYOND_TOKENS),
        CommitResult(OK, 2),
        CommitResult(ResultCode.WRONG_POSITION),
    ]
