"""Growth by tokens and by drafts that may be rejected."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow
from prefixcache.errors import PrefixCacheError
from prefixcache.types import ResultCode
from tests.core.manager import ONE, C, Manager, T, U, refused
from tests.support.invariants import check_invariants, snapshot


def test_decode_registers_a_block_when_it_fills_it() -> None:
    manager = Manager(10, 16)
    held = manager.allocate(T(55))
    manager.commit(held)
    assert manager.append(held, U(4)).new_block_ids == ()
    manager.commit(held)
    assert manager.hashes(held.table)[3] is None
    assert len(manager.append(held, C(19)).new_block_ids) == 1
    manager.commit(held)
    assert manager.hashes(held.table)[3] is not None
    assert manager.hashes(held.table)[4] is None


def test_a_new_block_comes_with_the_first_token_past_an_edge() -> None:
    manager = Manager(10)
    at_edge, before_edge = manager.allocate(T(8)), manager.allocate(U(7))
    assert len(manager.append(at_edge, [1]).new_block_ids) == 1
    assert manager.append(before_edge, [1]).new_block_ids == ()
    manager.commit(before_edge, 7)
    assert manager.hashes(before_edge.table)[1] is None
    manager.commit(before_edge)
    assert manager.hashes(before_edge.table)[1] is not None
    assert len(manager.append(before_edge, [1]).new_block_ids) == 1


def test_rows_of_append_go_in_order_and_one_that_does_not_fit_stops_no_other() -> None:
    manager = Manager(5)
    first, second, third = (manager.allocate(make(4)) for make in (T, U, C))
    batch = AppendBatch.of(
        [
            AppendRow(held.sequence_id, 4, np.arange(count, dtype=np.uint32))
            for held, count in ((first, 1), (second, 5), (third, 1))
        ]
    )
    results = manager.sequences.rows.append(ONE, batch).results()
    check_invariants(manager.sequences)
    assert [row.code for row in results] == [ResultCode.OK, ResultCode.NO_ROOM, ResultCode.OK]
    assert manager.table(second) == second.table
    assert manager.record(second).num_tokens == 4


def test_append_past_the_pool_is_a_permanent_refusal() -> None:
    manager = Manager(2)
    held = manager.allocate(T(8))
    before = snapshot(manager.sequences)
    assert manager.append(held, [1], start=8).code is ResultCode.EXCEEDS_POOL
    assert snapshot(manager.sequences) == before


def test_append_at_another_position_is_refused() -> None:
    manager = Manager(4)
    held = manager.allocate(T(6))
    before = snapshot(manager.sequences)
    for start in (5, 7):
        assert manager.append(held, [1], start=start).code is ResultCode.WRONG_POSITION
    assert snapshot(manager.sequences) == before


def test_tables_only_grow_in_append() -> None:
    manager = Manager(20)
    held = manager.allocate(T(5), num_lookahead_tokens=8)
    for count in (1, 0, 4, 3):
        before = list(held.table)
        manager.append(held, U(count))
        assert held.table[: len(before)] == before


def test_a_draft_registers_nothing_before_it_is_accepted() -> None:
    manager = Manager(8, num_layers=2)
    held = manager.allocate(T(6), num_lookahead_tokens=3)
    manager.attend(held)
    manager.attend(held, num_tokens=3)
    assert manager.computed(held) == 9
    assert manager.hit([*T(6), 7, 8, 9]) == 4
    manager.append(held, [7, 50], kv_valid=1)
    assert manager.computed(held) == 7, "the rejected draft's K/V are void"
    assert manager.hit([*T(7), 50, 9]) == 4
    manager.attend(held)
    assert manager.hit([*T(7), 50, 9]) == 8


def test_accepted_drafts_that_fill_a_block_register_it_without_a_new_computation() -> None:
    manager = Manager(8, num_layers=2)
    held = manager.allocate(T(6), num_lookahead_tokens=3)
    manager.attend(held)
    manager.attend(held, num_tokens=3)
    manager.append(held, [7, 8], kv_valid=2, lookahead=1)
    assert manager.hit(T(9)) == 8
    assert manager.computed(held) == 8


@pytest.mark.parametrize(
    ("size", "num_tokens", "lookahead", "num_blocks"),
    [(16, 14, 4, 2), (4, 6, 9, 4), (4, 6, 1, 2), (4, 7, 1, 3)],
)
def test_slots_are_reserved_for_every_draft_token(
    size: int, num_tokens: int, lookahead: int, num_blocks: int
) -> None:
    manager = Manager(8, size)
    held = manager.allocate(T(num_tokens))
    manager.append(held, [1], lookahead=lookahead)
    assert len(held.table) == num_blocks == -(-(num_tokens + 1 + lookahead) // size)


def test_drafts_past_the_reserved_slots_are_refused() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(6), num_lookahead_tokens=1)
    manager.attend(held)
    refused(manager, PrefixCacheError, lambda: manager.begin(0, held, num_tokens=2))
    manager.attend(held, num_tokens=1)


def test_truncate_drops_drafts_and_their_blocks() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(6), num_lookahead_tokens=6)
    manager.attend(held)
    manager.attend(held, num_tokens=5)
    dropped = manager.truncate(held, 6)
    assert len(dropped) == 1
    assert manager.computed(held) == 6
    refused(manager, PrefixCacheError, lambda: manager.begin(0, held, num_tokens=1))
