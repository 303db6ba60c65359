"""Step: the calls of an engine's steps on a stream do what the same calls one by one do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import (
    MAX_STEP_ALLOCATES,
    CacheOptions,
    Daemon,
    LimitOptions,
    ModelOptions,
)
from prefixcache.server.rpc_server import RpcServer
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.gate import held
from tests.support.invariants import check_invariants, snapshot
from tests.support.stubs import (
    TIMEOUT_S,
    Peer,
    Refused,
    Row,
    StreamCall,
    Stubs,
    connected,
    read_append,
    refusals,
)
from tests.support.waiting import until

OK, NOT_FOUND = cache_pb2.RESULT_CODE_OK, cache_pb2.RESULT_CODE_NOT_FOUND
StepRequest = cache_pb2.StepRequest
MAX_STREAMS = 2


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(
        CacheOptions(16, 4), limits=LimitOptions(max_step_streams=MAX_STREAMS)
    ) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs


@pytest.fixture
def peer(stubs: Stubs) -> Peer:
    return Peer(stubs)


@pytest.fixture
def steps(stubs: Stubs) -> Iterator[StreamCall]:
    with stubs.steps() as steps:
        yield steps


def allocates(peer: Peer, *prompts: Any, **fields: Any) -> list[cache_pb2.AllocateRequest]:
    return [
        cache_pb2.AllocateRequest(owner=peer.owner, token_ids=prompt, **fields)
        for prompt in prompts
    ]


def frees(peer: Peer, *sequence_ids: int) -> cache_pb2.FreeRequest:
    return cache_pb2.FreeRequest(owner=peer.owner, sequence_ids=sequence_ids)


def state(running: RunningDaemon) -> dict[str, Any]:
    sequences = running.daemon.sequences
    with sequences.lock:
        check_invariants(sequences)
        return snapshot(sequences)


# ---- one step


def test_a_step_answers_each_of_its_calls(peer: Peer, steps: StreamCall) -> None:
    first, second = (peer.allocate(range(6)).sequence_id for _ in range(2))
    reply = steps.run(
        StepRequest(
            free=frees(peer, second, 5),
            commit=peer.commit_request([(first, 0, 6)]),
            append=peer.append_request([Row(first, 6, (6, 7, 8))]),
            allocates=allocates(peer, range(9), range(50, 51)),
        )
    )
    assert list(reply.free.result_codes) == [OK, NOT_FOUND]
    assert list(reply.commit.result_codes) == [OK]
    assert list(reply.commit.num_cached_blocks) == [1]
    (row,) = read_append(reply.append)
    assert (row.code, len(row.new_block_ids)) == (OK, 1)
    # The block that the step's commit made findable is a hit of the step's allocate.
    assert [part.num_cached_tokens for part in reply.allocates] == [4, 0]
    assert [len(part.block_ids) for part in reply.allocates] == [3, 1]
    assert not reply.errors
    ids = [part.sequence_id for part in reply.allocates]
    assert peer.free(first, *ids) == [OK] * 3


def test_an_absent_call_has_no_answer_and_an_empty_step_an_empty_one(
    peer: Peer, steps: StreamCall
) -> None:
    assert steps.run(StepRequest()) == cache_pb2.StepResponse()
    assert steps.run(b"") == cache_pb2.StepResponse()
    reply = steps.run(StepRequest(free=frees(peer)))
    assert reply.HasField("free") and not reply.free.result_codes
    assert not reply.HasField("commit") and not reply.HasField("append")


def test_what_a_step_frees_is_room_for_its_new_sequences(peer: Peer, steps: StreamCall) -> None:
    whole_pool = range(16 * 4)
    held_id = peer.allocate(whole_pool).sequence_id
    reply = steps.run(
        StepRequest(
            free=frees(peer, held_id), allocates=allocates(peer, range(100, 132), range(200, 232))
        )
    )
    assert [len(part.block_ids) for part in reply.allocates] == [8, 8]


def test_what_a_step_commits_lets_go_of_the_source_of_a_copy() -> None:
    """The engine has copied by then: the source is room for the step's new sequences."""
    with running_daemon(CacheOptions(3, 4)) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        parent = peer.allocate(range(6)).sequence_id
        peer.commit(parent, 0, 6)
        (child,) = peer.fork(parent, 6)
        assert len(peer.append(child, 6, [6]).copies) == 1
        peer.free(parent)
        with stubs.steps() as steps:
            refused = steps.run(StepRequest(allocates=allocates(peer, [1])))
            assert refusals(refused)["allocates", 0].reason == "NO_ROOM"
            reply = steps.run(
                StepRequest(
                    commit=peer.commit_request([(child, 6, 1)]), allocates=allocates(peer, [1])
                )
            )
            assert not reply.errors and reply.allocates[0].sequence_id


def test_what_a_step_appends_is_not_there_for_its_commit(peer: Peer, steps: StreamCall) -> None:
    sequence_id = peer.allocate(range(6)).sequence_id
    reply = steps.run(
        StepRequest(
            append=peer.append_request([Row(sequence_id, 6, (6, 7))]),
            commit=peer.commit_request([(sequence_id, 0, 8)]),
        )
    )
    assert list(reply.commit.result_codes) == [cache_pb2.RESULT_CODE_BEYOND_TOKENS]
    assert list(reply.append.result_codes) == [OK]


def test_a_step_takes_at_most_so_many_new_sequences(
    running: RunningDaemon, peer: Peer, stubs: Stubs
) -> None:
    sequence_id = peer.allocate(range(6)).sequence_id
    before = state(running)
    with stubs.steps() as steps:
        too_many = [cache_pb2.AllocateRequest()] * (MAX_STEP_ALLOCATES + 1)
        steps.send(StepRequest(free=frees(peer, sequence_id), allocates=too_many))
        refusal = steps.ended()
    assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "allocates")
    assert str(MAX_STEP_ALLOCATES) in refusal.message
    assert state(running) == before
    with stubs.steps() as steps:
        reply = steps.run(StepRequest(allocates=too_many[1:]))
        assert len(reply.allocates) == len(refusals(reply)) == MAX_STEP_ALLOCATES


# ---- refused calls of a step


def alone(peer: Peer, name: str, request: Any) -> Refused:
    return peer.stubs.refused(name, request)


def test_a_refused_call_says_what_it_would_have_said_alone(
    running: RunningDaemon, peer: Peer, steps: StreamCall
) -> None:
    peer.allocate(range(40))
    sequence_id = peer.allocate([1], request_id="mine").sequence_id
    bad = {
        "free": cache_pb2.FreeRequest(owner=b"short"),
        "commit": peer.commit_request([(sequence_id, 0, 1)] * 2),
        "append": peer.append_request([]),
    }
    new = [
        *allocates(peer, range(100, 140), range(65), []),
        *allocates(peer, [1], layout_fingerprint=b"other"),
        *allocates(peer, [7, 8], request_id="mine"),
    ]
    before = state(running)
    reply = steps.run(StepRequest(**bad, allocates=new))
    assert state(running) == before
    assert not any(reply.HasField(name) for name in bad)
    assert list(reply.allocates) == [cache_pb2.AllocateResponse()] * len(new)
    found = refusals(reply)
    assert [found["allocates", i].reason for i in range(len(new))] == [
        "NO_ROOM",
        "EXCEEDS_POOL",
        "INVALID_ARGUMENT",
        "FINGERPRINT_MISMATCH",
        "REQUEST_ID_CONFLICT",
    ]
    calls = {(name, 0): alone(peer, name.capitalize(), bad[name]) for name in bad}
    calls |= {("allocates", i): alone(peer, "Allocate", request) for i, request in enumerate(new)}
    assert set(found) == set(calls)
    for place, refusal in calls.items():
        part = found[place]
        assert (part.code, part.message, part.infos) == (
            refusal.code,
            refusal.message,
            refusal.infos,
        )
        assert part.retry_delay_s == refusal.retry_delay_s
        assert part.numbers["boot_id"] == running.daemon.boot_id.hex()
    no_room = found["allocates", 0]
    assert no_room.retry_delay_s and no_room.numbers["needed"] == "10"


@pytest.mark.parametrize("refused", ["free", "commit", "append", "allocates"])
def test_a_refused_call_leaves_the_others_of_its_step_alone(
    refused: str, peer: Peer, steps: StreamCall
) -> None:
    first, second = (peer.allocate(range(6)).sequence_id for _ in range(2))
    request = StepRequest(
        free=frees(peer, second),
        commit=peer.commit_request([(first, 0, 6)]),
        append=peer.append_request([Row(first, 6, (6,))]),
        allocates=allocates(peer, [1], [2], [3]),
    )
    if refused == "allocates":
        request.allocates[1].owner = b""
    else:
        getattr(request, refused).owner = b""
    reply = steps.run(request)
    assert list(refusals(reply)) == [(refused, 1 if refused == "allocates" else 0)]
    ids = [part.sequence_id for part in reply.allocates]
    assert [bool(sequence_id) for sequence_id in ids] == [True, refused != "allocates", True]
    columns = [reply.free, reply.commit, reply.append]
    names = ["free", "commit", "append"]
    assert [list(part.result_codes) for part in columns] == [
        [] if name == refused else [OK] for name in names
    ]
    # What was refused can still be done, and what was done is.
    assert peer.commit(first, 0 if refused == "commit" else 6, 0) == OK
    assert peer.append(first, 6 if refused == "append" else 7, [8]).code == OK
    assert peer.free(second) == [OK if refused == "free" else NOT_FOUND]


def test_rows_are_refused_as_those_of_the_calls_alone_are(peer: Peer, steps: StreamCall) -> None:
    sequence_id = peer.allocate(range(6)).sequence_id
    reply = steps.run(
        StepRequest(
            commit=peer.commit_request([(sequence_id, 0, 7), (9, 0, 1)]),
            append=peer.append_request([Row(sequence_id, 5, (1,)), Row(9, 0, (1,))]),
        )
    )
    assert not reply.errors
    assert list(reply.commit.result_codes) == [cache_pb2.RESULT_CODE_BEYOND_TOKENS, NOT_FOUND]
    assert list(reply.append.result_codes) == [cache_pb2.RESULT_CODE_WRONG_POSITION, NOT_FOUND]


def test_a_daemon_with_storage_refuses_the_commit_and_copies_itself() -> None:
    layout = KVLayout(2, 1, 4, 4, "float32")
    with (
        running_daemon(CacheOptions(16, 4), ModelOptions(layout)) as running,
        connected(running.target) as stubs,
        stubs.steps() as steps,
    ):
        peer = Peer(stubs)
        sequence_id = peer.allocate(range(6)).sequence_id
        reply = steps.run(
            StepRequest(
                commit=peer.commit_request([(sequence_id, 0, 6)]),
                append=peer.append_request([Row(sequence_id, 6, (6,))]),
            )
        )
        assert refusals(reply)["commit", 0].reason == "STORAGE_OWNED"
        assert [row.code for row in read_append(reply.append)] == [OK]


# ---- repeats


def test_a_step_sent_twice_is_done_once_and_answered_twice(
    running: RunningDaemon, peer: Peer, stubs: Stubs
) -> None:
    ids = [peer.allocate(range(start, start + 6)).sequence_id for start in (0, 10, 20)]
    data = StepRequest(
        free=frees(peer, ids[2]),
        commit=peer.commit_request([(ids[0], 0, 6), (ids[1], 0, 0)]),
        append=peer.append_request([Row(ids[0], 6, (6, 7, 8)), Row(ids[1], 6, (9,), 1, 2)]),
        allocates=[
            *allocates(peer, range(9), request_id="one"),
            *allocates(peer, range(50, 60), request_id="two"),
        ],
    ).SerializeToString()
    with stubs.steps() as steps, stubs.steps() as others:
        first = steps.run(data)
        assert list(first.free.result_codes) == [OK] and not first.errors
        done = state(running)
        # As in a Free alone: the second time there is nothing left to do.
        first.free.result_codes[:] = [NOT_FOUND]
        for again in (steps.run(data), others.run(data), others.run(data)):
            again.append.num_blocks_free = first.append.num_blocks_free
            assert again == first
            assert state(running) == done


# ---- many steps


def test_steps_sent_ahead_are_answered_in_order(peer: Peer, steps: StreamCall) -> None:
    sequence_id = peer.allocate([0]).sequence_id
    for position in range(1, 41):
        steps.send(StepRequest(append=peer.append_request([Row(sequence_id, position, (7,))])))
    replies = [steps.receive() for _ in range(40)]
    rows = [read_append(reply.append)[0] for reply in replies]
    assert [row.code for row in rows] == [OK] * 40
    grown = [position for position in range(1, 41) if rows[position - 1].new_block_ids]
    assert grown == list(range(4, 41, 4))


def test_two_streams_serve_one_owner_or_two(running: RunningDaemon, stubs: Stubs) -> None:
    one, two = Peer(stubs), Peer(stubs)
    with stubs.steps() as first, stubs.steps() as second:
        mine = first.run(StepRequest(allocates=allocates(one, [1, 2]))).allocates[0].sequence_id
        grow = StepRequest(append=one.append_request([Row(mine, 2, (3,))]))
        assert list(second.run(grow).append.result_codes) == [OK]
        theirs = first.run(StepRequest(allocates=allocates(two, [1]))).allocates[0].sequence_id
        # A sequence answers its owner only, whatever stream it came of.
        stranger = StepRequest(free=frees(one, theirs))
        assert list(first.run(stranger).free.result_codes) == [NOT_FOUND]
        assert list(second.run(StepRequest(free=frees(two, theirs))).free.result_codes) == [OK]
        assert one.free(mine) == [OK]


def test_a_stream_that_is_half_closed_answers_what_was_sent_and_ends_well(
    peer: Peer, stubs: Stubs
) -> None:
    with stubs.steps() as steps:
        steps.send(StepRequest(allocates=allocates(peer, [1])))
        steps.close()
        assert steps.receive().allocates[0].sequence_id
        with pytest.raises(StopIteration):
            steps.receive()


# ---- how streams end


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x0a\x02\x0a", StepRequest().SerializeToString() + b"\x0f"],
    ids=["a tag without its value", "a part that is cut off", "wire type 7"],
)
def test_bytes_that_are_no_step_end_the_stream(
    running: RunningDaemon, stubs: Stubs, peer: Peer, data: bytes
) -> None:
    with stubs.steps() as steps:
        steps.send(StepRequest(allocates=allocates(peer, [1])))
        steps.send(data)
        steps.send(StepRequest(allocates=allocates(peer, [2])))
        assert steps.receive().allocates[0].sequence_id
        refusal = steps.ended()
    assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request")
    assert refusal.numbers["boot_id"] == running.daemon.boot_id.hex()
    assert len(running.daemon.sequences.live) == 1


def test_a_bug_of_ours_ends_the_stream_and_not_the_daemon(
    running: RunningDaemon, stubs: Stubs, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, stubs.steps() as steps:
        patch.setattr(running.daemon.sequences, "free", broken)
        steps.send(StepRequest(free=frees(peer, 1)))
        refusal = steps.ended()
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "ZeroDivision" not in refusal.message
    with stubs.steps() as steps:
        assert steps.run(StepRequest(free=frees(peer, 1))).free.result_codes


def test_one_stream_too_many_is_refused_and_takes_no_place(stubs: Stubs) -> None:
    with stubs.steps() as first, stubs.steps() as second:
        for steps in (first, second):
            steps.run(StepRequest())
        for _ in range(5):
            with stubs.steps() as third:
                refusal = third.ended()
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_STREAMS",
            )
            assert refusal.numbers["limit"] == str(MAX_STREAMS)
        second.close()
        with pytest.raises(StopIteration):
            second.receive()
        assert places(stubs, first) == MAX_STREAMS


def places(stubs: Stubs, *open_streams: StreamCall) -> int:
    """How many streams there can be, those that are open included."""
    for steps in open_streams:
        steps.run(StepRequest())
    own: list[StreamCall] = []
    contexts = []
    try:
        while True:
            context = stubs.steps()
            own.append(context.__enter__())
            contexts.append(context)
            own[-1].run(StepRequest())
    except Refused as refusal:
        assert refusal.reason == "TOO_MANY_STREAMS"
        return len(own) - 1 + len(open_streams)
    finally:
        for context in contexts:
            context.__exit__(None, None, None)
        for steps in own[:-1]:
            assert not list(steps.replies)


def vanish(target: str) -> None:
    """The connection is gone while a step is under way."""
    with connected(target) as stubs, stubs.steps() as steps:
        steps.run(StepRequest())


def cancel(target: str) -> None:
    with connected(target) as stubs, stubs.steps() as steps:
        steps.run(StepRequest())
        steps.replies.cancel()
        assert steps.ended().code is grpc.StatusCode.CANCELLED


def be_late(target: str) -> None:
    with connected(target) as stubs, stubs.steps(timeout_s=0.5) as steps:
        steps.send(StepRequest())
        with pytest.raises(Refused) as caught:
            while True:
                steps.receive()  # An answer, if it comes in time.
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("leave", [vanish, cancel, be_late])
def test_a_stream_that_is_gone_gives_its_place_back(
    running: RunningDaemon, stubs: Stubs, leave: Callable[[str], None]
) -> None:
    for _ in range(2 * MAX_STREAMS):
        until(lambda: places(stubs) == MAX_STREAMS)
        leave(running.target)
    until(lambda: places(stubs) == MAX_STREAMS)


def test_a_stream_that_goes_while_its_step_is_done_gives_its_place_back(
    running: RunningDaemon, stubs: Stubs, peer: Peer
) -> None:
    with held(running.daemon.sequences, "prepare") as gate, connected(running.target) as other:
        with other.steps() as steps:
            steps.send(StepRequest(allocates=allocates(peer, [1])))
            gate.wait()
            steps.replies.cancel()
        assert places(stubs) == MAX_STREAMS - 1
        gate.release()
    until(lambda: places(stubs) == MAX_STREAMS)


def test_open_streams_keep_no_call_waiting() -> None:
    with (
        running_daemon(CacheOptions(16, 4), max_workers=1) as running,
        connected(running.target) as stubs,
        stubs.steps() as first,
        stubs.steps() as second,
        stubs.steps() as third,
    ):
        for steps in (first, second, third):
            steps.run(StepRequest())
        assert stubs.stats().num_blocks == 16


# ---- a daemon that stops


class Stopping:
    """A daemon of its own, and a thread that stops it."""

    def __init__(self) -> None:
        self.daemon = Daemon(CacheOptions(16, 4))
        self.server = RpcServer(self.daemon, max_workers=2)
        self.target = self.server.listen("127.0.0.1:0")
        self.server.start()
        self.have_ended: list[bool] = []
        self._thread = threading.Thread(target=self._stop)

    def start(self, stubs: Stubs) -> None:
        """Returns once new calls are refused."""
        health = health_pb2_grpc.HealthStub(stubs.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        self._thread.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING

    def goes_on_for(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self._thread.is_alive()

    def join(self) -> bool:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.have_ended == [True]

    def _stop(self) -> None:
        self.have_ended.append(self.server.stop(10 * TIMEOUT_S))


def test_a_daemon_that_stops_waits_for_no_idle_stream() -> None:
    stopping = Stopping()
    with connected(stopping.target) as stubs, stubs.steps() as steps, stubs.steps() as silent:
        steps.run(StepRequest())
        stopping.start(stubs)
        assert stopping.join()
        for stream in (steps, silent):
            assert stream.ended().code is grpc.StatusCode.UNAVAILABLE


def test_a_daemon_that_stops_answers_the_step_that_it_has_begun() -> None:
    stopping = Stopping()
    with (
        connected(stopping.target) as stubs,
        held(stopping.daemon.sequences, "prepare") as gate,
        stubs.steps() as steps,
    ):
        peer = Peer(stubs)
        steps.send(StepRequest(allocates=allocates(peer, [1])))
        steps.send(StepRequest(allocates=allocates(peer, [2])))
        gate.wait()
        stopping.start(stubs)
        # All calls have ended, and without the step it would be over in half a second.
        assert stopping.goes_on_for(1.0)
        gate.release()
        assert steps.receive().allocates[0].sequence_id
        refusal = steps.ended()
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert stopping.join()
        assert len(stopping.daemon.sequences.live) == 1


def test_steps_are_answered_while_calls_run_on_and_only_new_sequences_refused() -> None:
    stopping = Stopping()
    with connected(stopping.target) as stubs, stubs.steps() as steps:
        peer = Peer(stubs)
        sequence_id = peer.allocate(range(6)).sequence_id
        steps.run(StepRequest())
        with held(stopping.daemon.sequences, "prepare") as gate:
            lookup = stubs.start("Lookup", cache_pb2.LookupRequest(token_ids=[1]))
            gate.wait()
            stopping.start(stubs)
            reply = steps.run(
                StepRequest(
                    commit=peer.commit_request([(sequence_id, 0, 6)]),
                    append=peer.append_request([Row(sequence_id, 6, (1,))]),
                    allocates=allocates(peer, [1]),
                )
            )
            refusal = refusals(reply)["allocates", 0]
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert list(reply.commit.result_codes) == list(reply.append.result_codes) == [OK]
            freed = steps.run(StepRequest(free=frees(peer, sequence_id)))
            assert list(freed.free.result_codes) == [OK]
            gate.release()
            assert stubs.finish(lookup).num_blocks_needed == 1
        assert stopping.join()


def test_a_step_that_outlasts_the_drain_timeout_is_cut() -> None:
    stopping = Stopping()
    with (
        connected(stopping.target) as stubs,
        held(stopping.daemon.sequences, "prepare") as gate,
        stubs.steps() as steps,
    ):
        steps.send(StepRequest(allocates=allocates(Peer(stubs), [1])))
        gate.wait()
        assert stopping.server.stop(0.2) is False
        assert steps.ended().code is grpc.StatusCode.UNAVAILABLE
