"""Sessions over a real socket. The daemon's clock is the test's, and sweeps are made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.core.sessions import SESSION_ID_BYTES, SessionLimits
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2, session_pb2
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.server.keep_alive import FIRST_BEAT_TIMEOUT_S
from prefixcache.server.rpc_server import RpcServer
from prefixcache.server.session_service import MAX_CLIENT_NAME_BYTES, MIN_TTL_S
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import RunningDaemon, running_daemon, sweeper
from tests.support.invariants import check_invariants, snapshot
from tests.support.stubs import Peer, Refused, Row, StreamCall, Stubs, connected, refusals
from tests.support.toy_model import Run, ToyModel, attention_request
from tests.support.waiting import until

CACHE = CacheOptions(num_blocks=16, block_size=4)
LAYOUT = KVLayout(2, 2, 8, 4, "float32")
TTL_S, GRACE_S, MAX_TTL_S = 10.0, 2.0, 100.0
LIMITS = SessionLimits(
    max_sessions=3, max_ttl_s=MAX_TTL_S, max_sequences=3, reconnect_grace_s=GRACE_S
)
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Served:
    running: RunningDaemon
    stubs: Stubs
    clock: Clock = field(default_factory=Clock)

    def open(self, ttl_s: float = TTL_S, name: str = "", request_id: str = "") -> bytes:
        request = session_pb2.OpenSessionRequest(
            ttl_s=ttl_s, client_name=name, request_id=request_id
        )
        reply = self.stubs.call("OpenSession", request)
        assert (reply.ttl_s, reply.boot_id) == (ttl_s, self.running.daemon.boot_id)
        return bytes(reply.session_id)

    def close(self, session_id: bytes) -> int:
        request = session_pb2.CloseSessionRequest(session_id=session_id)
        return int(self.stubs.call("CloseSession", request).num_sequences)

    def listed(self) -> dict[str, admin_pb2.SessionInfo]:
        """By the names of their clients."""
        reply = self.stubs.call("ListSessions", admin_pb2.ListSessionsRequest())
        return {info.client_name: info for info in reply.sessions}

    def pass_s(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.running.sweep()

    def is_connected(self, name: str = "") -> bool:
        return self.listed()[name].is_connected

    def num_streams(self) -> int:
        return len(self.running.server._keep_alives._open)


def beat(session_id: bytes) -> session_pb2.KeepAliveRequest:
    return session_pb2.KeepAliveRequest(session_id=session_id)


@pytest.fixture
def served() -> Iterator[Served]:
    clock = Clock()
    with (
        running_daemon(CACHE, None, None, LIMITS, clock=clock) as running,
        connected(running.target) as stubs,
    ):
        yield Served(running, stubs, clock)
        with running.daemon.sequences.lock:
            check_invariants(running.daemon.sequences)


# ---- opening and closing


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, MIN_TTL_S / 2, MAX_TTL_S + 1, math.inf, math.nan])
def test_a_ttl_out_of_bounds_is_refused(served: Served, ttl_s: float) -> None:
    refusal = served.stubs.refused("OpenSession", session_pb2.OpenSessionRequest(ttl_s=ttl_s))
    assert (refusal.reason, refusal.field) == ("INVALID_ARGUMENT", "ttl_s")
    assert served.stubs.stats().sessions == 0


@pytest.mark.parametrize("ttl_s", [MIN_TTL_S, MAX_TTL_S])
def test_a_ttl_at_its_bounds_is_taken(served: Served, ttl_s: float) -> None:
    assert len(served.open(ttl_s)) == SESSION_ID_BYTES


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"client_name": "é" * (MAX_CLIENT_NAME_BYTES // 2) + "x"}, "client_name"),
        ({"request_id": "x" * 257}, "request_id"),
    ],
)
def test_texts_that_are_too_long_are_refused(served: Served, fields: Any, field: str) -> None:
    request = session_pb2.OpenSessionRequest(ttl_s=TTL_S, **fields)
    refusal = served.stubs.refused("OpenSession", request)
    assert (refusal.reason, refusal.field) == ("INVALID_ARGUMENT", field)
    served.open(name="é" * (MAX_CLIENT_NAME_BYTES // 2))


def test_a_repeated_open_makes_one_session(served: Served) -> None:
    first = served.open(name="a", request_id="key")
    assert served.open(name="a", request_id="key") == first
    assert served.stubs.stats().sessions == 1
    request = session_pb2.OpenSessionRequest(ttl_s=TTL_S, client_name="b", request_id="key")
    assert served.stubs.refused("OpenSession", request).reason == "REQUEST_ID_CONFLICT"


def test_one_session_too_many_is_refused(served: Served) -> None:
    for _ in range(LIMITS.max_sessions):
        served.open()
    refusal = served.stubs.refused("OpenSession", session_pb2.OpenSessionRequest(ttl_s=TTL_S))
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_SESSIONS", "3")


def test_closing_frees_what_the_session_held(served: Served) -> None:
    session = served.open()
    peer = Peer(served.stubs, session)
    peer.allocate(range(6)), peer.allocate(range(6))
    assert served.close(session) == 2
    stats = served.stubs.stats()
    assert (stats.sessions, stats.sequences, stats.referenced) == (0, 0, 0)
    with pytest.raises(Refused) as again:
        served.close(session)
    assert (again.value.code, again.value.reason) == (NOT_FOUND, "SESSION_NOT_FOUND")


@pytest.mark.parametrize("name", ["CloseSession", "KeepAlive"])
@pytest.mark.parametrize("length", [0, 16, SESSION_ID_BYTES - 1, SESSION_ID_BYTES + 1])
def test_what_cannot_be_a_session_id_is_refused(served: Served, name: str, length: int) -> None:
    if name == "CloseSession":
        request = session_pb2.CloseSessionRequest(session_id=bytes(length))
        refusal = served.stubs.refused(name, request)
    else:
        with served.stubs.stream(name) as stream:
            stream.send(beat(bytes(length)))
            refusal = stream.ended()
    assert (refusal.reason, refusal.field) == ("INVALID_ARGUMENT", "session_id")


def test_the_limits_are_in_the_daemons_description(served: Served) -> None:
    limits = served.stubs.info().limits
    assert limits.max_sessions == LIMITS.max_sessions
    assert limits.max_session_ttl_s == LIMITS.max_ttl_s
    assert limits.max_sequences_per_session == LIMITS.max_sequences
    assert limits.reconnect_grace_s == LIMITS.reconnect_grace_s


def test_a_session_with_as_many_sequences_as_it_may_have_gets_no_more(served: Served) -> None:
    peer = Peer(served.stubs, served.open())
    first, *_ = [peer.allocate([1]).sequence_id for _ in range(3)]
    with pytest.raises(Refused) as refusal:
        peer.allocate([1])
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (refusal.value.reason, refusal.value.numbers["limit"]) == ("TOO_MANY_SEQUENCES", "3")
    peer.commit(first, 0, 1)
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
        peer.fork(first, 1)
    peer.free(first)
    peer.allocate([1])


# ---- calls in a session that has ended


def calls_in(owner: bytes, sequence_id: int) -> dict[str, Any]:
    ids = [sequence_id]
    batch = attention_pb2.AttentionBatch(
        owner=owner, sequence_ids=ids, start_positions=[6], num_tokens=[1]
    )
    tensor = attention_pb2.Tensor(
        data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=[1, 2, 8], data=bytes(64)
    )
    return {
        "Allocate": cache_pb2.AllocateRequest(owner=owner, token_ids=[1]),
        "Append": cache_pb2.AppendRequest(
            owner=owner, sequence_ids=ids, start_positions=[6], num_tokens=[1], token_ids=[7]
        ),
        "Fork": cache_pb2.ForkRequest(
            owner=owner, sequence_id=sequence_id, num_tokens=6, request_ids=[""]
        ),
        "Truncate": cache_pb2.TruncateRequest(
            owner=owner, sequence_id=sequence_id, num_tokens_before=6, num_tokens_after=5
        ),
        "Free": cache_pb2.FreeRequest(owner=owner, sequence_ids=ids, request_ids=["q"]),
        "Prefill": attention_pb2.PrefillRequest(batch=batch, q=tensor, k=tensor, v=tensor),
        "Decode": attention_pb2.DecodeRequest(batch=batch, q=tensor, k=tensor, v=tensor),
        "CloseSession": session_pb2.CloseSessionRequest(session_id=owner),
    }


@pytest.fixture
def storing() -> Iterator[Served]:
    clock = Clock()
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT), None, LIMITS, clock=clock) as running,
        connected(running.target) as stubs,
    ):
        yield Served(running, stubs, clock)


@pytest.mark.parametrize("name", calls_in(b"", 0))
def test_late_calls_of_an_expired_session_write_nowhere(storing: Served, name: str) -> None:
    model = ToyModel(LAYOUT, 4)
    late = Run(Peer(storing.stubs, storing.open()), model, list(range(6))).allocate()
    storing.pass_s(TTL_S)
    # Whoever has the blocks now keeps what is in them.
    other = Run(Peer(storing.stubs), model, list(range(50, 50 + 64))).allocate()
    other.compute()
    assert set(late.block_ids) <= set(other.block_ids)
    sequences, memory = storing.running.daemon.sequences, storing.running.daemon.engine.memory
    before = snapshot(sequences), memory.spans.clone()
    request = (
        attention_request(name, 0, [(late, 1)])
        if name in ("Prefill", "Decode")
        else calls_in(late.peer.owner, late.sequence_id)[name]
    )
    refusal = storing.stubs.refused(name, request)
    assert (refusal.code, refusal.reason) == (NOT_FOUND, "SESSION_NOT_FOUND")
    assert refusal.numbers["boot_id"] == storing.running.daemon.boot_id.hex()
    assert snapshot(sequences) == before[0]
    assert memory.spans.equal(before[1])


def test_commits_and_steps_in_a_session_that_has_ended_are_refused(served: Served) -> None:
    peer = Peer(served.stubs, served.open())
    sequence_id = peer.allocate(range(6)).sequence_id
    served.close(peer.owner)
    commit = peer.commit_request([(sequence_id, 0, 6)])
    assert served.stubs.refused("Commit", commit).reason == "SESSION_NOT_FOUND"
    calls = calls_in(peer.owner, sequence_id)
    step = cache_pb2.StepRequest(
        free=calls["Free"], commit=commit, append=calls["Append"], allocates=[calls["Allocate"]]
    )
    with served.stubs.steps() as steps:
        parts = refusals(steps.run(step))
    assert len(parts) == 4
    assert {part.reason for part in parts.values()} == {"SESSION_NOT_FOUND"}


def test_sequences_answer_no_other_session(served: Served) -> None:
    mine, theirs = Peer(served.stubs, served.open()), Peer(served.stubs, served.open())
    sequence_id = mine.allocate(range(6), request_id="q").sequence_id
    assert theirs.free(sequence_id) == [cache_pb2.RESULT_CODE_NOT_FOUND]
    assert theirs.append_rows([Row(sequence_id, 6, (1,))])[0].code == (
        cache_pb2.RESULT_CODE_NOT_FOUND
    )
    by_name = cache_pb2.FreeRequest(owner=theirs.owner, request_ids=["q"])
    assert list(served.stubs.call("Free", by_name).result_codes) == [
        cache_pb2.RESULT_CODE_NOT_FOUND
    ]
    assert mine.append_rows([Row(sequence_id, 6, (1,))])[0].code == cache_pb2.RESULT_CODE_OK


# ---- KeepAlive


def test_beats_keep_a_session_alive_beyond_its_ttl(served: Served) -> None:
    session = served.open()
    Peer(served.stubs, session).allocate(range(6))
    with served.stubs.stream("KeepAlive") as stream:
        for _ in range(4):
            reply = stream.run(beat(session))
            assert (reply.ttl_s, reply.boot_id) == (TTL_S, served.running.daemon.boot_id)
            served.pass_s(TTL_S - 1)
        assert served.stubs.stats().sequences == 1
        served.pass_s(1)
    assert (served.stubs.stats().sequences, served.stubs.stats().expired_sessions) == (0, 1)


def test_a_beat_for_a_session_that_is_not_there_ends_the_stream(served: Served) -> None:
    with served.stubs.stream("KeepAlive") as stream:
        stream.send(beat(bytes(SESSION_ID_BYTES)))
        refusal = stream.ended()
    assert (refusal.code, refusal.reason) == (NOT_FOUND, "SESSION_NOT_FOUND")
    assert refusal.numbers["boot_id"] == served.running.daemon.boot_id.hex()


def test_a_stream_is_of_one_session(served: Served) -> None:
    first, second = served.open(name="first"), served.open(name="second")
    with served.stubs.stream("KeepAlive") as stream:
        stream.run(beat(first))
        stream.send(beat(second))
        refusal = stream.ended()
    assert (refusal.reason, refusal.field) == ("INVALID_ARGUMENT", "session_id")
    until(lambda: not served.is_connected("first"))
    served.pass_s(GRACE_S)
    assert list(served.listed()) == ["second"]


ENDS: dict[str, Callable[[Stubs, StreamCall], object]] = {
    "half-closed": lambda stubs, stream: stream.close(),
    "cancelled": lambda stubs, stream: stream.replies.cancel(),
    "connection closed": lambda stubs, stream: stubs.channel.close(),
    "no message": lambda stubs, stream: stream.send(b"\xff\xff\xff"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_session_whose_stream_breaks_is_gone_after_the_grace(served: Served, end: str) -> None:
    session = served.open(ttl_s=MAX_TTL_S)
    Peer(served.stubs, session).allocate(range(6))
    with connected(served.running.target) as stubs, stubs.stream("KeepAlive") as stream:
        stream.run(beat(session))
        assert served.is_connected()
        ENDS[end](stubs, stream)
        until(lambda: not served.is_connected())
    served.pass_s(GRACE_S - 0.1)
    assert served.stubs.stats().sequences == 1
    served.pass_s(0.1)
    stats = served.stubs.stats()
    assert (stats.sequences, stats.sessions, stats.referenced) == (0, 0, 0)


def test_a_session_that_is_back_within_the_grace_keeps_its_sequences(served: Served) -> None:
    session = served.open()
    peer = Peer(served.stubs, session)
    sequence_id = peer.allocate(range(6)).sequence_id
    with served.stubs.stream("KeepAlive") as stream:
        stream.run(beat(session))
    until(lambda: not served.is_connected())
    served.pass_s(GRACE_S - 0.1)
    with served.stubs.stream("KeepAlive") as stream:
        stream.run(beat(session))
        served.pass_s(GRACE_S)
        assert peer.free(sequence_id) == [cache_pb2.RESULT_CODE_OK]


def test_a_second_stream_of_a_session_takes_the_place_of_the_first(served: Served) -> None:
    session = served.open()
    with served.stubs.stream("KeepAlive") as first, served.stubs.stream("KeepAlive") as second:
        first.run(beat(session))
        second.run(beat(session))
        first.send(beat(session))
        assert first.ended().code is grpc.StatusCode.CANCELLED
        until(lambda: served.num_streams() == 1)
        served.pass_s(GRACE_S)
        assert served.is_connected()
        second.run(beat(session))


def test_a_first_stream_that_is_silent_is_cut_once_a_second_is_there(served: Served) -> None:
    session = served.open()
    with served.stubs.stream("KeepAlive") as first, served.stubs.stream("KeepAlive") as second:
        first.run(beat(session))
        second.run(beat(session))
        served.pass_s(0.0)
        assert first.ended().code is grpc.StatusCode.CANCELLED
        until(lambda: served.num_streams() == 1)
        assert served.is_connected()


@pytest.mark.parametrize("end", ["closed", "expired"])
def test_a_stream_ends_with_its_session(served: Served, end: str) -> None:
    session = served.open()
    with served.stubs.stream("KeepAlive") as stream:
        stream.run(beat(session))
        if end == "closed":
            served.close(session)
        served.pass_s(TTL_S)
        assert stream.ended().code is grpc.StatusCode.CANCELLED
    until(lambda: served.num_streams() == 0)


def test_streams_that_say_nothing_are_cut(served: Served) -> None:
    with served.stubs.stream("KeepAlive") as stream:
        until(lambda: served.num_streams() == 1)
        served.pass_s(FIRST_BEAT_TIMEOUT_S - 0.1)
        assert served.num_streams() == 1
        served.pass_s(0.1)
        assert stream.ended().code is grpc.StatusCode.CANCELLED
    until(lambda: served.num_streams() == 0)


def test_silent_streams_hold_no_worker_and_one_too_many_is_refused(served: Served) -> None:
    """Two a session: the daemon may not know yet that the one before has broken."""
    limit = 2 * LIMITS.max_sessions
    streams = [served.stubs.stream("KeepAlive") for _ in range(limit)]
    opened = [stream.__enter__() for stream in streams]
    until(lambda: served.num_streams() == limit)
    with served.stubs.stream("KeepAlive") as one_more:
        refusal = one_more.ended()
    assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_STREAMS", str(limit))
    session = served.open()
    assert served.stubs.stats().sessions == 1, "calls have threads of their own"
    served.pass_s(FIRST_BEAT_TIMEOUT_S)
    for stream in opened:
        assert stream.ended().code is grpc.StatusCode.CANCELLED
    until(lambda: served.num_streams() == 0)
    with served.stubs.stream("KeepAlive") as stream:
        stream.run(beat(session))
    for stream in streams:
        stream.__exit__(None, None, None)


# ---- the daemon itself


def test_a_daemon_that_was_stopped_gives_its_sessions_the_time_back() -> None:
    clock = Clock()
    with (
        running_daemon(CACHE, None, None, LIMITS, clock=clock) as running,
        connected(running.target) as stubs,
    ):
        served = Served(running, stubs, clock)
        served.open()
        sweeps = sweeper(running)
        clock.now_s += 50 * TTL_S  # no sweep: the process stood still
        sweeps.sweep()
        assert served.stubs.stats().sessions == 1
        for _ in range(2 * int(TTL_S / sweeps.interval_s)):
            clock.now_s += sweeps.interval_s
            sweeps.sweep()
        assert served.stubs.stats().sessions == 0


def test_sweeps_come_often_enough_for_a_session_to_be_gone_within_a_second(
    served: Served,
) -> None:
    """Of its break: the grace of a daemon that was told nothing, and the longest wait for a
    sweep."""
    assert SessionLimits().reconnect_grace_s + sweeper(served.running).interval_s < 1.0


def test_a_stopping_daemon_waits_for_no_stream_and_opens_no_session(tmp_path: Path) -> None:
    daemon = Daemon(CACHE)
    server = RpcServer(daemon, max_workers=2)
    target = server.listen(f"unix:{tmp_path}/daemon.sock")
    server.start()
    with connected(target) as stubs:
        served = Served(RunningDaemon(target, daemon, server), stubs)
        session = served.open()
        with stubs.stream("KeepAlive") as stream:
            stream.run(beat(session))
            assert server.stop(drain_timeout_s=20.0)
            assert stream.ended().code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
            refusal = stubs.refused("OpenSession", session_pb2.OpenSessionRequest(ttl_s=TTL_S))
            assert refusal.code is grpc.StatusCode.UNAVAILABLE
    daemon.close()


def test_a_draining_daemon_says_so(served: Served) -> None:
    served.running.daemon.is_draining = True
    refusal = served.stubs.refused("OpenSession", session_pb2.OpenSessionRequest(ttl_s=TTL_S))
    assert refusal.reason == "DRAINING"


def test_sessions_are_listed_in_pages(served: Served) -> None:
    for name in "abc":
        served.open(name=name)
    names, token = [], ""
    while True:
        request = admin_pb2.ListSessionsRequest(page_size=2, page_token=token)
        page = served.stubs.call("ListSessions", request)
        names.append([info.client_name for info in page.sessions])
        token = page.next_page_token
        if not token:
            break
    assert names == [["a", "b"], ["c"]]
    for fields, field_name in (
        ({"page_size": 1001}, "page_size"),
        ({"page_token": "x"}, "page_token"),
    ):
        refusal = served.stubs.refused("ListSessions", admin_pb2.ListSessionsRequest(**fields))
        assert refusal.field == field_name


def test_a_sequence_is_listed_with_its_client_and_under_the_digest_of_its_session(
    served: Served,
) -> None:
    session = served.open(name="an engine")
    Peer(served.stubs, session).allocate([1])
    Peer(served.stubs).allocate([1])
    reply = served.stubs.call("ListSequences", admin_pb2.ListSequencesRequest())
    in_session, without = reply.sequences
    listed = served.listed()["an engine"]
    assert (in_session.client_name, without.client_name) == ("an engine", "")
    assert in_session.owner_digest == listed.owner_digest != without.owner_digest
    assert listed.num_sequences == 1
    assert served.stubs.stats().owners == 2


# ---- old copies of calls


def ordered(name: str, owner: bytes, sequence_id: int, number: int, settled: int) -> Any:
    request = calls_in(owner, sequence_id)[name]
    order = (request.batch if name in ("Prefill", "Decode") else request).order
    order.number, order.settled = number, settled
    return request


@pytest.mark.parametrize("name", [name for name in calls_in(b"", 0) if name != "CloseSession"])
def test_an_old_copy_of_a_call_is_refused_and_changes_nothing(storing: Served, name: str) -> None:
    run = Run(Peer(storing.stubs, storing.open()), ToyModel(LAYOUT, 4), list(range(7))).allocate()
    newer = cache_pb2.FreeRequest(owner=run.peer.owner)
    newer.order.number, newer.order.settled = 9, 8
    storing.stubs.call("Free", newer)
    sequences, memory = storing.running.daemon.sequences, storing.running.daemon.engine.memory
    before = snapshot(sequences), memory.spans.clone()
    late = ordered(name, run.peer.owner, run.sequence_id, 8, 7)
    refusal = storing.stubs.refused(name, late)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OVERTAKEN")
    assert (refusal.numbers["number"], refusal.numbers["settled"]) == ("8", "8")
    assert (snapshot(sequences), memory.spans.equal(before[1])) == (before[0], True)


@pytest.mark.parametrize("name", [name for name in calls_in(b"", 0) if name != "CloseSession"])
@pytest.mark.parametrize(("number", "settled"), [(0, 0), (3, 3), (3, 4)])
def test_an_order_that_cannot_be_is_refused(
    storing: Served, name: str, number: int, settled: int
) -> None:
    run = Run(Peer(storing.stubs, storing.open()), ToyModel(LAYOUT, 4), list(range(7))).allocate()
    request = ordered(name, run.peer.owner, run.sequence_id, number, settled)
    refusal = storing.stubs.refused(name, request)
    assert (refusal.reason, refusal.field) == ("INVALID_ARGUMENT", "order.settled")
