"""A sequence keeps its blocks while a call runs on it."""

from __future__ import annotations

import pytest

from prefixcache.core.sequence import CommitRow
from prefixcache.errors import (
    InvalidArgumentError,
    NoRoomError,
    PrefixCacheError,
    SequenceBusyError,
    SequenceNotFoundError,
    WrongPositionError,
)
from prefixcache.types import BlockCopy, ResultCode
from tests.core.manager import ONE, TWO, C, Manager, T, U, forked, refused
from tests.support.invariants import check_invariants, snapshot


def test_a_freed_sequence_keeps_its_blocks_until_its_call_has_ended_and_commits_nothing() -> None:
    manager = Manager(4, num_layers=1)
    held = manager.allocate(T(8))
    ticket = manager.begin(0, held)
    assert manager.free(held) == [ResultCode.OK]
    assert manager.free(held) == [ResultCode.NOT_FOUND]
    assert manager.refs(held.table) == [1, 1]
    assert manager.sequences.stats().sequences == 0
    refused(manager, NoRoomError, lambda: manager.allocate(U(12), owner=TWO))
    manager.end(ticket)
    assert manager.pool.num_free == 4
    assert manager.pool.num_cached == 0


def test_a_sequence_freed_by_request_id_keeps_its_blocks_until_its_call_has_ended() -> None:
    manager = Manager(4, num_layers=1)
    held = manager.allocate(T(8), request_id="r")
    ticket = manager.begin(0, held)
    assert manager.sequences.free(ONE, [], ["r"]) == [ResultCode.OK]
    assert manager.sequences.free(ONE, [], ["r"]) == [ResultCode.NOT_FOUND]
    assert manager.refs(held.table) == [1, 1]
    manager.end(ticket)
    assert (manager.pool.num_free, manager.pool.num_cached) == (4, 0)


def test_a_sequence_with_calls_on_two_layers_goes_when_both_have_ended() -> None:
    manager = Manager(4, num_layers=2)
    held = manager.allocate(T(8))
    tickets = [manager.begin(layer, held) for layer in range(2)]
    manager.free(held)
    manager.end(tickets[0])
    assert manager.refs(held.table) == [1, 1]
    manager.end(tickets[1])
    assert manager.refs(held.table) == [0, 0]


def test_nothing_else_runs_on_a_sequence_while_its_call_runs() -> None:
    manager = Manager(8, num_layers=2)
    held = manager.allocate(T(8))
    manager.begin(0, held)
    before = snapshot(manager.sequences)
    assert manager.append(held, [1], start=8).code is ResultCode.BUSY
    (committed,) = manager.sequences.rows.commit(ONE, [CommitRow(held.sequence_id, 0, 4)])
    assert committed.code is ResultCode.BUSY
    for call in (
        lambda: manager.begin(0, held),
        lambda: manager.fork(held),
        lambda: manager.truncate(held, 4),
    ):
        with pytest.raises(SequenceBusyError):
            call()
    assert snapshot(manager.sequences) == before
    manager.begin(1, held)


def test_one_bad_row_fails_the_whole_attention_call_before_anything_is_held() -> None:
    manager = Manager(8, num_layers=1)
    good, other = manager.allocate(T(4)), manager.allocate(U(4))
    theirs = manager.allocate(C(4), owner=TWO)

    def begin(ids: list[int], starts: list[int], counts: list[int]) -> None:
        manager.sequences.running.begin_attention(ONE, 0, ids, starts, counts)

    for error, ids, starts, counts in (
        (SequenceNotFoundError, [good.sequence_id, 777], [0, 0], [4, 4]),
        (SequenceNotFoundError, [good.sequence_id, theirs.sequence_id], [0, 0], [4, 4]),
        (InvalidArgumentError, [good.sequence_id, good.sequence_id], [0, 0], [2, 4]),
        (WrongPositionError, [good.sequence_id, other.sequence_id], [0, 1], [4, 3]),
        (PrefixCacheError, [good.sequence_id, other.sequence_id], [0, 0], [4, 5]),
    ):
        refused(manager, error, lambda ids=ids, s=starts, c=counts: begin(ids, s, c))
    begin([good.sequence_id, other.sequence_id], [0, 0], [4, 4])


def test_a_repeated_attention_call_writes_nothing_and_advances_nothing() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(8))
    manager.end(manager.begin(0, held, num_tokens=4))
    ticket = manager.sequences.running.begin_attention(ONE, 0, [held.sequence_id], [0], [4])
    (row,) = ticket.rows
    assert row.is_repeat
    assert row.first_writable == 4
    manager.end(ticket)
    assert manager.computed(held) == 4
    for start, count in ((0, 5), (2, 2), (5, 1)):
        with pytest.raises(WrongPositionError):
            manager.sequences.running.begin_attention(ONE, 0, [held.sequence_id], [start], [count])


def test_a_call_that_failed_before_it_wrote_can_be_made_again() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(8))
    manager.end(manager.begin(0, held), written=False)
    assert manager.computed(held) == 0
    assert manager.hit(T(8)) == 0
    manager.attend(held)
    assert manager.hit(T(8)) == 7


def test_an_owner_with_a_running_call_does_not_expire() -> None:
    manager = Manager(8, num_layers=1, owner_ttl_s=10.0)
    held, idle = manager.allocate(T(8)), manager.allocate(U(4))
    ticket = manager.begin(0, held)
    manager.clock_s = 100.0
    assert manager.sequences.expire() == 0
    manager.end(ticket)
    manager.clock_s = 109.0
    assert manager.sequences.expire() == 0, "the end of its call renewed it"
    manager.clock_s = 110.0
    assert manager.sequences.expire() == 2
    assert manager.free(idle) == [ResultCode.NOT_FOUND]


def test_a_sequence_that_is_being_copied_for_stays_still_until_the_copy_is_made() -> None:
    manager = Manager(8)
    parent, child = forked(manager)
    source = parent.table[1]
    manager.append(child, [70])
    ticket = manager.sequences.running.begin_copies(ONE, [child.sequence_id])
    assert ticket.copies == (BlockCopy(source, child.table[1]),)
    assert manager.append(child, [1], start=7).code is ResultCode.BUSY
    refused(manager, SequenceBusyError, lambda: manager.begin(0, child))
    manager.free(child, parent)
    assert manager.refs([source, child.table[1]]) == [1, 1]
    manager.sequences.running.end_copies(ticket)
    check_invariants(manager.sequences)
    assert manager.pool.num_free == 8
