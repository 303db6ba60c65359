"""Who may name a sequence, retries, and the end of silent owners."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.errors import (
    NoRoomError,
    RequestIdConflictError,
    SequenceNotFoundError,
    WrongPositionError,
)
from prefixcache.types import CacheUse, ExtraKeys, FullHit, ResultCode
from tests.core.manager import ONE, TWO, C, Held, Manager, T, U, refused
from tests.support.invariants import snapshot


def test_a_sequence_answers_only_its_owner() -> None:
    manager = Manager(8, num_layers=1)
    held = manager.allocate(T(6))
    manager.commit(held)
    stranger = Held(TWO, held.sequence_id, 6, 0, held.table)
    before = snapshot(manager.sequences)
    assert manager.sequences.free(TWO, [held.sequence_id]) == [ResultCode.NOT_FOUND]
    assert manager.append(stranger, [1], start=6).code is ResultCode.NOT_FOUND
    assert manager.sequences.rows.commit(TWO, [CommitRow(held.sequence_id, 6, 0)])[0].code is (
        ResultCode.NOT_FOUND
    )
    for call in (
        lambda: manager.sequences.fork(TWO, held.sequence_id, 6, [""]),
        lambda: manager.sequences.truncate(TWO, held.sequence_id, 6, 5),
        lambda: manager.sequences.running.begin_attention(TWO, 0, [held.sequence_id], [6], [0]),
    ):
        with pytest.raises(SequenceNotFoundError):
            call()
    assert snapshot(manager.sequences) == before


def test_the_same_request_id_and_content_is_answered_again() -> None:
    manager = Manager(8)
    first = manager.allocate(T(6), request_id="q")
    before = snapshot(manager.sequences)
    again = manager.allocate(T(6), request_id="q")
    assert again == first
    assert snapshot(manager.sequences) == before


def test_a_repeat_gets_the_first_reply_though_the_cache_has_changed_since() -> None:
    manager = Manager(8)
    first = manager.allocate(T(9), request_id="q")
    manager.fill(T(8))
    assert manager.hit(T(9)) == 8
    assert manager.allocate(T(9), request_id="q") == first


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (T(7), {}),
        ([*T(5), 9], {}),
        (T(6), {"num_lookahead_tokens": 1}),
        (T(6), {"cache_use": CacheUse.NO_WRITE}),
        (T(6), {"full_hit": FullHit.LAST_BLOCK}),
        (T(6), {"extra_keys": ExtraKeys(cache_salt="s")}),
    ],
)
def test_the_same_request_id_with_other_content_is_a_conflict(tokens, options) -> None:
    manager = Manager(8)
    manager.allocate(T(6), request_id="q")
    refused(
        manager,
        RequestIdConflictError,
        lambda: manager.allocate(tokens, request_id="q", **options),
    )


def test_a_request_id_of_a_sequence_that_went_on_is_a_conflict() -> None:
    manager = Manager(8)
    held = manager.allocate(T(6), request_id="q")
    manager.commit(held)
    refused(manager, RequestIdConflictError, lambda: manager.allocate(T(6), request_id="q"))


def test_a_request_id_belongs_to_its_owner_and_is_free_after_free() -> None:
    manager = Manager(8)
    mine = manager.allocate(T(6), request_id="q")
    theirs = manager.allocate(U(6), owner=TWO, request_id="q")
    assert mine.sequence_id != theirs.sequence_id
    manager.free(mine)
    assert manager.allocate(C(6), request_id="q").sequence_id != mine.sequence_id


def test_a_fork_with_request_ids_is_repeated_and_not_made_twice() -> None:
    manager = Manager(8)
    parent = manager.allocate(T(6))
    manager.commit(parent)
    children = manager.fork(parent, request_ids=["a", "b"])
    before = snapshot(manager.sequences)
    assert manager.fork(parent, request_ids=["a", "b"]) == children
    assert snapshot(manager.sequences) == before
    refused(manager, RequestIdConflictError, lambda: manager.fork(parent, request_ids=["b", "c"]))


def test_a_fork_is_not_repeated_from_a_request_id_that_another_sequence_has_now() -> None:
    manager = Manager(8)
    parent = manager.allocate(T(6))
    manager.commit(parent)
    (child,) = manager.fork(parent, request_ids=["a"])
    manager.free(child)
    manager.allocate(U(4), request_id="a")
    refused(manager, RequestIdConflictError, lambda: manager.fork(parent, request_ids=["a"]))


def test_repeats_of_state_calls_are_answered_again_and_change_nothing() -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    commit = CommitRow(held.sequence_id, 0, 6)
    append = AppendBatch.of([AppendRow(held.sequence_id, 6, np.array(U(5), dtype=np.uint32))])
    calls = (
        lambda: manager.sequences.rows.commit(ONE, [commit]),
        lambda: manager.sequences.rows.append(ONE, append),
        lambda: manager.sequences.truncate(ONE, held.sequence_id, 11, 7),
    )
    for call in calls:
        first = call()
        before = snapshot(manager.sequences)
        assert call() == first
        assert snapshot(manager.sequences) == before


@pytest.mark.parametrize("num_committed", [0, 1, 6])
def test_the_commit_before_an_append_is_answered_again_with_it(num_committed: int) -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    commit = CommitRow(held.sequence_id, 0, num_committed)
    append = AppendBatch.of([AppendRow(held.sequence_id, 6, np.array(U(5), dtype=np.uint32))])
    first = manager.sequences.rows.commit(ONE, [commit]), manager.sequences.rows.append(ONE, append)
    before = snapshot(manager.sequences)
    again = manager.sequences.rows.commit(ONE, [commit]), manager.sequences.rows.append(ONE, append)
    assert again == first
    assert snapshot(manager.sequences) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, held: manager.append(held, [7]),
        lambda manager, held: manager.truncate(held, 6),
        lambda manager, held: manager.commit(held),
        lambda manager, held: manager.fork(held),
        lambda manager, held: manager.attend(held, num_tokens=1),
    ],
    ids=["append", "truncate", "commit", "fork", "attention"],
)
def test_the_commit_before_an_append_is_forgotten_with_the_call_after_it(call) -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    commit = CommitRow(held.sequence_id, 0, 6)
    manager.sequences.rows.commit(ONE, [commit])
    manager.append(held, [], lookahead=1)
    call(manager, held)
    (result,) = manager.sequences.rows.commit(ONE, [commit])
    assert result.code is ResultCode.WRONG_POSITION


def test_only_the_last_applied_call_can_be_repeated() -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    manager.append(held, [7])
    manager.truncate(held, 6)
    assert manager.append(held, [7], start=6).code is ResultCode.OK
    assert manager.record(held).num_tokens == 7
    manager.commit(held)
    assert manager.append(held, [7], start=6).code is ResultCode.WRONG_POSITION


def test_a_state_call_and_an_attention_call_end_the_repeats_of_one_another() -> None:
    manager = Manager(12, num_layers=2)
    held = manager.allocate(T(6), request_id="q")
    manager.end(manager.begin(0, held))
    refused(manager, RequestIdConflictError, lambda: manager.allocate(T(6), request_id="q"))
    manager.append(held, [7])
    refused(
        manager,
        WrongPositionError,
        lambda: manager.sequences.running.begin_attention(ONE, 0, [held.sequence_id], [0], [6]),
    )


def test_commit_beyond_the_tokens_or_elsewhere_is_refused() -> None:
    manager = Manager(8)
    held = manager.allocate(T(6), num_lookahead_tokens=2)
    before = snapshot(manager.sequences)
    rows = [CommitRow(held.sequence_id, start, count) for start, count in ((0, 7), (1, 2))]
    codes = [row.code for row in manager.sequences.rows.commit(ONE, rows)]
    assert codes == [ResultCode.BEYOND_TOKENS, ResultCode.WRONG_POSITION]
    assert snapshot(manager.sequences) == before


def test_sequences_of_a_silent_owner_expire_and_any_call_renews_all_of_them() -> None:
    manager = Manager(12, owner_ttl_s=10.0)
    mine = [manager.allocate(T(4)), manager.allocate(U(4))]
    theirs = manager.allocate(C(4), owner=TWO)
    manager.clock_s = 9.0
    manager.append(mine[0], [1])
    manager.clock_s = 10.0
    assert manager.sequences.expire() == 1
    assert manager.free(theirs) == [ResultCode.NOT_FOUND]
    manager.clock_s = 18.9
    assert manager.sequences.expire() == 0
    manager.clock_s = 19.0
    assert manager.sequences.expire() == 2
    assert manager.sequences.stats().referenced == 0
    assert manager.sequences.stats().owners == 0
    assert manager.sequences.stats().expired_sequences == 3


CALLS_OF_AN_OWNER = {
    "allocate": lambda manager, held: manager.allocate(T(3)),
    "append": lambda manager, held: manager.append(held, [1]),
    "commit": lambda manager, held: manager.commit(held),
    "fork": lambda manager, held: manager.fork(held),
    "truncate": lambda manager, held: manager.truncate(held, 5),
    "free": lambda manager, held: manager.free(held),
    "attention": lambda manager, held: manager.sequences.running.begin_attention(
        ONE, 0, [], [], []
    ),
}


@pytest.mark.parametrize("call", CALLS_OF_AN_OWNER)
def test_every_call_of_an_owner_renews_it(call: str) -> None:
    manager = Manager(12, owner_ttl_s=10.0)
    silent, held = manager.allocate(U(4)), manager.allocate(T(6))
    manager.commit(held)
    manager.clock_s = 9.0
    CALLS_OF_AN_OWNER[call](manager, held)
    manager.clock_s = 18.9
    assert manager.sequences.expire() == 0
    manager.clock_s = 19.0
    assert manager.sequences.expire() >= 1
    assert manager.free(silent) == [ResultCode.NOT_FOUND]


def test_a_refused_call_renews_its_owner_too() -> None:
    manager = Manager(4, owner_ttl_s=10.0)
    held = manager.allocate(T(4))
    manager.clock_s = 9.0
    assert manager.append(held, [1], start=1).code is ResultCode.WRONG_POSITION
    manager.clock_s = 18.0
    assert manager.sequences.expire() == 0


def test_a_dead_clients_half_of_the_pool_comes_back_with_its_ttl() -> None:
    manager = Manager(8, owner_ttl_s=10.0)
    manager.allocate(T(16))
    refused(manager, NoRoomError, lambda: manager.allocate(U(32), owner=TWO))
    manager.clock_s = 10.0
    manager.sequences.expire()
    assert len(manager.allocate(U(32), owner=TWO).table) == 8


def test_late_calls_on_an_expired_sequence_touch_no_new_owner() -> None:
    manager = Manager(2, owner_ttl_s=10.0, num_layers=1)
    late = manager.allocate(T(8))
    manager.clock_s = 10.0
    manager.sequences.expire()
    other = manager.allocate(U(8), owner=TWO)
    before = snapshot(manager.sequences)
    assert manager.free(late) == [ResultCode.NOT_FOUND]
    with pytest.raises(SequenceNotFoundError):
        manager.sequences.running.begin_attention(ONE, 0, [late.sequence_id], [0], [8])
    assert snapshot(manager.sequences) == before
    assert manager.table(other) == other.table
