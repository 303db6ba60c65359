"""Sessions: who holds what, and when each of them ends. The clock is the test's."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.core.sessions import SESSION_ID_BYTES, CallOrder, SessionLimits
from prefixcache.errors import (
    OvertakenError,
    RequestIdConflictError,
    SequenceNotFoundError,
    SessionNotFoundError,
    TooManySequencesError,
    TooManySessionsError,
)
from prefixcache.types import ResultCode
from tests.core.manager import ONE, Held, Manager, T, U, refused
from tests.support.invariants import check_invariants, snapshot

TTL_S, GRACE_S = 10.0, 2.0
LIMITS = SessionLimits(max_sessions=3, max_sequences=3, reconnect_grace_s=GRACE_S)


class Sessions(Manager):
    def __init__(self, num_blocks: int = 8, num_layers: int = 1) -> None:
        super().__init__(num_blocks, num_layers=num_layers, owner_ttl_s=600, session_limits=LIMITS)
        self.table_of = self.sequences.live.sessions

    def open(self, ttl_s: float = TTL_S, name: str = "", request_id: str = "") -> bytes:
        return self.sequences.live.sessions.open(ttl_s, name, request_id).session_id

    def expire_at(self, clock_s: float) -> int:
        self.clock_s = clock_s
        ended = self.sequences.expire()
        check_invariants(self.sequences)
        return ended

    def is_there(self, session_id: bytes) -> bool:
        return session_id in self.table_of


CALLS = {
    "allocate": lambda manager, held: manager.allocate(U(3), owner=held.owner),
    "append": lambda manager, held: manager.sequences.rows.append(
        held.owner,
        AppendBatch.of([AppendRow(held.sequence_id, 6, np.array([1], dtype=np.uint32))]),
    ).results(),
    "commit": lambda manager, held: manager.sequences.rows.commit(
        held.owner, [CommitRow(held.sequence_id, 6, 0)]
    ),
    "fork": lambda manager, held: manager.sequences.fork(held.owner, held.sequence_id, 6, [""]),
    "truncate": lambda manager, held: manager.sequences.truncate(
        held.owner, held.sequence_id, 6, 5
    ),
    "free": lambda manager, held: manager.sequences.free(held.owner, [held.sequence_id]),
    "free by request id": lambda manager, held: manager.sequences.free(held.owner, [], ["q"]),
    "attention": lambda manager, held: manager.sequences.running.begin_attention(
        held.owner, 0, [held.sequence_id], [6], [0]
    ),
    "close": lambda manager, held: manager.sequences.live.close_session(held.owner),
}


def held_in_session(manager: Sessions) -> Held:
    held = manager.allocate(T(6), owner=manager.open(), request_id="q")
    manager.commit(held)
    return held


# ---- opening


def test_a_session_has_a_random_id_that_no_owner_can_be_taken_for() -> None:
    manager = Sessions()
    ids = {manager.open() for _ in range(3)}
    assert len(ids) == 3
    assert {len(session_id) for session_id in ids} == {SESSION_ID_BYTES}
    assert manager.sequences.stats().sessions == 3


def test_one_session_more_than_the_limit_is_refused_until_one_has_ended() -> None:
    manager = Sessions()
    first, *_ = [manager.open() for _ in range(3)]
    error = refused(manager, TooManySessionsError, manager.open)
    assert error.fields["limit"] == 3
    manager.sequences.live.close_session(first)
    manager.open()


def test_a_repeated_open_makes_one_session_and_renews_it() -> None:
    manager = Sessions()
    first = manager.open(name="a", request_id="k")
    manager.clock_s = 6.0
    assert manager.open(name="a", request_id="k") == first
    assert manager.expire_at(15.9) == 0
    assert manager.is_there(first)
    for ttl_s, name in ((TTL_S + 1, "a"), (TTL_S, "b")):
        refused(
            manager,
            RequestIdConflictError,
            lambda ttl_s=ttl_s, name=name: manager.open(ttl_s, name, "k"),
        )
    manager.sequences.live.close_session(first)
    assert manager.open(name="b", request_id="k") != first


# ---- the end


def test_a_session_ends_with_its_ttl_and_frees_what_it_held() -> None:
    manager = Sessions()
    session = manager.open()
    for tokens in (T(4), U(4)):
        manager.allocate(tokens, owner=session)
    other = manager.allocate(T(4), owner=ONE)
    assert manager.expire_at(TTL_S - 0.1) == 0
    assert manager.expire_at(TTL_S) == 2
    assert not manager.is_there(session)
    stats = manager.sequences.stats()
    assert (stats.sessions, stats.expired_sessions, stats.expired_sequences) == (0, 1, 2)
    assert (stats.sequences, stats.referenced, stats.owners) == (1, 1, 1)
    assert manager.free(other) == [ResultCode.OK]


def test_the_ttl_of_owners_is_none_of_a_sessions_business() -> None:
    manager = Sessions()
    session = manager.open(ttl_s=5000.0)
    manager.allocate(T(4), owner=session)
    manager.allocate(U(4), owner=ONE)
    assert manager.expire_at(600.0) == 1
    assert manager.sequences.stats().sequences == 1


@pytest.mark.parametrize("call", [name for name in CALLS if name != "close"])
def test_every_call_in_a_session_renews_it(call: str) -> None:
    manager = Sessions()
    held = held_in_session(manager)
    manager.clock_s = TTL_S - 1
    CALLS[call](manager, held)
    manager.expire_at(2 * TTL_S - 1.1)
    assert manager.is_there(held.owner)
    manager.expire_at(2 * TTL_S - 1)
    assert not manager.is_there(held.owner)


def test_a_refused_call_renews_its_session_too() -> None:
    manager = Sessions()
    held = held_in_session(manager)
    manager.clock_s = TTL_S - 1
    with pytest.raises(SequenceNotFoundError):
        manager.sequences.truncate(held.owner, held.sequence_id + 1, 6, 5)
    manager.expire_at(TTL_S)
    assert manager.is_there(held.owner)


def test_closing_a_session_frees_what_it_held() -> None:
    manager = Sessions()
    held = held_in_session(manager)
    manager.allocate(U(4), owner=held.owner)
    assert manager.sequences.live.close_session(held.owner) == 2
    check_invariants(manager.sequences)
    stats = manager.sequences.stats()
    assert (stats.sessions, stats.sequences, stats.referenced) == (0, 0, 0)
    assert (stats.expired_sessions, stats.expired_sequences) == (0, 0)
    assert manager.hit(T(6)) == 4, "what it has computed is still to be found"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("end", ["closed", "expired"])
def test_a_call_in_a_session_that_has_ended_is_refused_and_changes_nothing(
    call: str, end: str
) -> None:
    manager = Sessions()
    held = held_in_session(manager)
    if end == "closed":
        manager.sequences.live.close_session(held.owner)
    else:
        manager.expire_at(TTL_S)
    # The blocks have another owner now.
    taker = manager.allocate(T(32), owner=ONE)
    error = refused(manager, SessionNotFoundError, lambda: CALLS[call](manager, held))
    assert held.owner.hex() not in str(error), "an id is a key, and not for logs"
    assert manager.table(taker) == taker.table


def test_an_id_that_never_was_is_refused_like_one_that_has_ended() -> None:
    manager = Sessions()
    refused(
        manager,
        SessionNotFoundError,
        lambda: manager.allocate(T(4), owner=bytes(SESSION_ID_BYTES)),
    )


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("allocate", "close")])
def test_calls_of_one_session_cannot_touch_anothers_sequences(call: str) -> None:
    manager = Sessions()
    held = held_in_session(manager)
    stranger = Held(manager.open(), held.sequence_id, 6, 0, held.table)
    before = snapshot(manager.sequences)
    try:
        result = CALLS[call](manager, stranger)
    except SequenceNotFoundError:
        pass
    else:
        (row,) = result
        assert getattr(row, "code", row) is ResultCode.NOT_FOUND
    assert snapshot(manager.sequences) == before


# ---- broken streams


def test_a_session_whose_stream_broke_ends_after_the_grace() -> None:
    manager = Sessions()
    held = held_in_session(manager)
    stream = manager.table_of.connect(held.owner)
    manager.clock_s = 3.0
    manager.table_of.disconnect(held.owner, stream)
    assert manager.expire_at(3.0 + GRACE_S - 0.1) == 0
    assert manager.expire_at(3.0 + GRACE_S) == 1
    assert not manager.is_there(held.owner)


def test_a_session_that_is_back_within_the_grace_lives_on() -> None:
    manager = Sessions()
    session = manager.open()
    manager.table_of.disconnect(session, manager.table_of.connect(session))
    manager.clock_s = GRACE_S / 2
    manager.table_of.connect(session)
    manager.expire_at(GRACE_S / 2 + TTL_S - 0.1)
    assert manager.is_there(session)
    manager.expire_at(GRACE_S / 2 + TTL_S)
    assert not manager.is_there(session), "a stream that says nothing keeps nothing alive"


def test_calls_do_not_stand_in_for_a_stream_that_broke() -> None:
    manager = Sessions()
    held = held_in_session(manager)
    manager.table_of.disconnect(held.owner, manager.table_of.connect(held.owner))
    manager.clock_s = GRACE_S - 0.1
    manager.append(held, [1])
    manager.expire_at(GRACE_S)
    assert not manager.is_there(held.owner)


def test_a_session_whose_first_stream_is_late_waits_for_it_until_its_ttl() -> None:
    manager = Sessions()
    session = manager.open()
    manager.expire_at(TTL_S - 0.1)
    manager.table_of.connect(session)
    manager.expire_at(2 * TTL_S - 0.2)
    assert manager.is_there(session)


def test_the_end_of_a_stream_that_was_replaced_is_no_break() -> None:
    manager = Sessions()
    session = manager.open()
    first = manager.table_of.connect(session)
    second = manager.table_of.connect(session)
    manager.table_of.disconnect(session, first)
    manager.expire_at(GRACE_S)
    assert manager.is_there(session)
    assert not manager.table_of.is_connected(session, first)
    assert manager.table_of.is_connected(session, second)


def test_the_end_of_a_stream_after_its_session_is_nothing() -> None:
    manager = Sessions()
    session = manager.open()
    stream = manager.table_of.connect(session)
    manager.sequences.live.close_session(session)
    manager.table_of.disconnect(session, stream)
    with pytest.raises(SessionNotFoundError):
        manager.table_of.connect(session)


def test_time_in_which_the_daemon_stood_still_is_given_back() -> None:
    manager = Sessions()
    alive, broken = manager.open(), manager.open()
    manager.table_of.disconnect(broken, manager.table_of.connect(broken))
    manager.clock_s = 100.0
    manager.table_of.postpone(100.0)
    manager.sequences.expire()
    assert manager.is_there(alive) and manager.is_there(broken)
    manager.expire_at(100.0 + GRACE_S)
    assert manager.is_there(alive) and not manager.is_there(broken)
    manager.expire_at(100.0 + TTL_S)
    assert not manager.is_there(alive)


# ---- running calls


@pytest.mark.parametrize("end", ["close", "ttl", "broken stream"])
def test_blocks_of_a_running_call_outlive_their_session(end: str) -> None:
    manager = Sessions(num_layers=2)
    held = manager.allocate(T(6), owner=manager.open())
    ticket = manager.begin(0, held)
    if end == "close":
        manager.sequences.live.close_session(held.owner)
    elif end == "ttl":
        assert manager.expire_at(TTL_S) == 1
    else:
        manager.table_of.disconnect(held.owner, manager.table_of.connect(held.owner))
        assert manager.expire_at(GRACE_S) == 1
    assert not manager.is_there(held.owner)
    assert not set(manager.free_order()) & set(held.table)
    manager.end(ticket)
    assert set(manager.free_order()) > set(held.table)
    assert manager.sequences.stats().cached == 0, "nothing commits after the end"


# ---- limits


def test_one_sequence_more_than_a_session_may_have_is_refused() -> None:
    manager = Sessions()
    session = manager.open()
    parent = manager.allocate(T(2), owner=session)
    manager.commit(parent)
    refused(manager, TooManySequencesError, lambda: manager.fork(parent, 3))
    (child, _) = manager.fork(parent, 2)
    refused(manager, TooManySequencesError, lambda: manager.allocate(U(2), owner=session))
    assert manager.allocate(U(2), owner=ONE).sequence_id, "others are not meant"
    manager.free(child)
    manager.allocate(U(2), owner=session)


def test_a_repeat_at_the_limit_is_answered_again() -> None:
    manager = Sessions()
    session = manager.open()
    held = [manager.allocate(T(2), owner=session, request_id=name) for name in "abc"]
    assert manager.allocate(T(2), owner=session, request_id="c") == held[2]


# ---- what operators see


def test_sessions_are_listed_with_what_they_hold() -> None:
    manager = Sessions()
    first, second = manager.open(name="engine a"), manager.open(ttl_s=20.0, name="engine b")
    manager.table_of.connect(second)
    held = manager.allocate(T(4), owner=second)
    manager.clock_s = 4.0
    one, other = manager.sequences.listings.sessions_after(0, 10)
    assert (one.client_name, one.num_sequences, one.is_connected) == ("engine a", 0, False)
    assert (one.ttl_s, one.left_s, one.age_s) == (TTL_S, TTL_S - 4.0, 4.0)
    assert (other.client_name, other.num_sequences, other.is_connected) == ("engine b", 1, True)
    assert manager.sequences.listings.sessions_after(one.serial, 10) == [other]
    assert manager.sequences.listings.sessions_after(0, 1) == [one]
    (info,) = manager.sequences.listings.sequences_after(0, 10)
    assert (info.sequence_id, info.client_name) == (held.sequence_id, "engine b")
    assert {one.digest, other.digest} == {manager.table_of.find(i).digest for i in (first, second)}


# ---- old copies of calls


def test_a_call_that_its_client_has_done_with_is_refused() -> None:
    manager = Sessions()
    session, other = manager.open(), manager.open()
    live = manager.sequences.live
    live.take_turn(session, CallOrder(1, 0))
    live.take_turn(session, CallOrder(3, 0))
    live.take_turn(session, CallOrder(2, 0))  # the client waits for all three
    live.take_turn(session, CallOrder(3, 0))  # a repeat
    live.take_turn(session, CallOrder(4, 2))
    for number in (1, 2):
        error = refused(
            manager,
            OvertakenError,
            lambda number=number: live.take_turn(session, CallOrder(number, 0)),
        )
        assert error.fields == {"number": number, "settled": 2}
    live.take_turn(session, CallOrder(5, 1))  # it was sent before the other
    live.take_turn(session, CallOrder(3, 0))
    live.take_turn(other, CallOrder(1, 0))


def test_only_calls_in_a_session_that_are_numbered_have_an_order() -> None:
    manager = Sessions()
    session = manager.open()
    live = manager.sequences.live
    live.take_turn(session, CallOrder(9, 8))
    live.take_turn(session, None)
    for _ in range(2):
        live.take_turn(ONE, CallOrder(1, 0))
        live.take_turn(ONE, CallOrder(3, 2))
    manager.sequences.live.close_session(session)
    refused(manager, SessionNotFoundError, lambda: live.take_turn(session, CallOrder(10, 0)))
