"""What Allocate or Fork made without the client's knowledge is freed ahead of a later call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from prefixcache import AsyncClient, Client
from prefixcache.client.channel import DEFAULT_TIMEOUT_S, channel_options
from prefixcache.client.lost_requests import LostRequests
from prefixcache.errors import DeadlineExceededError, InternalError, NoRoomError
from prefixcache.rpc._pb import cache_pb2
from prefixcache.rpc.wire import column32, twin
from prefixcache.server.daemon import CacheOptions
from prefixcache.types import ResultCode
from tests.client.fake_daemon import HANG, allocated
from tests.client.twins import open_client
from tests.support.arrivals import Arrivals, ends_too_early
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants
from tests.support.waiting import WAIT_S, until, until_async

PROMPT = list(range(10))
TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
"""An outcome: what a client sees whose deadline has passed."""
OK, UNKNOWN = ResultCode.OK, ResultCode.NOT_FOUND


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.fixture
def running(arrivals: Arrivals) -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(num_blocks=16, block_size=4), tracing=arrivals) as daemon:
        yield daemon


TooLate = Callable[..., None]


@pytest.fixture
def too_late(running: RunningDaemon, arrivals: Arrivals) -> TooLate:
    """A call ends at its deadline, and the daemon does its part afterwards."""

    def make(call: Callable[[float], Any], num_made: int = 1) -> None:
        sequences = running.daemon.sequences
        wanted = len(sequences.live) + num_made
        before = arrivals.num_by_rpc.total()
        with sequences.lock:
            ends_too_early(call, lambda: arrivals.num_by_rpc.total() > before)
        until(lambda: len(sequences.live) >= wanted)

    return make


def assert_nothing_is_held(running: RunningDaemon) -> None:
    sequences = running.daemon.sequences
    with sequences.lock:
        assert len(sequences.live) == 0
        assert sequences.pool.num_referenced == 0
        check_invariants(sequences)


# ---- with the real daemon


def test_a_sequence_made_after_the_deadline_is_freed_ahead_of_the_next_call(
    client_kind, running, too_late
):
    with open_client(client_kind, running.target) as client:
        client.sequence([1]).free()
        too_late(lambda limit_s: client.sequence(PROMPT, timeout_s=limit_s))
        client.lookup(PROMPT)
        assert_nothing_is_held(running)


def test_the_room_of_a_lost_sequence_is_there_for_the_same_call_once_more(
    client_kind, running, too_late
):
    with open_client(client_kind, running.target) as client:
        client.sequence([1]).free()
        whole_pool = range(16 * 4)
        too_late(lambda limit_s: client.sequence(whole_pool, timeout_s=limit_s))
        with client.sequence(whole_pool):
            pass
        assert_nothing_is_held(running)


def test_children_made_after_the_deadline_are_freed(client_kind, running, too_late):
    with open_client(client_kind, running.target) as client:
        with client.sequence(PROMPT) as parent:
            parent.commit(len(PROMPT))
            too_late(lambda limit_s: parent.fork(3, timeout_s=limit_s), num_made=3)
            client.stats()
            assert len(running.daemon.sequences.live) == 1
        assert_nothing_is_held(running)


def test_closing_the_client_frees_what_is_lost(client_kind, running, too_late):
    with open_client(client_kind, running.target) as client:
        client.sequence([1]).free()
        too_late(lambda limit_s: client.sequence(PROMPT, timeout_s=limit_s))
    assert_nothing_is_held(running)


def test_what_the_caller_named_is_the_callers_to_ask_for_again(client_kind, running, too_late):
    live = running.daemon.sequences.live
    with open_client(client_kind, running.target) as client:
        client.sequence([1]).free()
        too_late(lambda limit_s: client.sequence(PROMPT, request_id="mine", timeout_s=limit_s))
        client.stats()
        assert len(live) == 1
        with client.sequence(PROMPT, request_id="mine") as parent:
            parent.commit(len(PROMPT))
            names = ["one", "two"]
            too_late(
                lambda limit_s: parent.fork(2, request_ids=names, timeout_s=limit_s), num_made=2
            )
            client.stats()
            assert len(live) == 3
            children = parent.fork(2, request_ids=names)
            assert len(live) == 3
            client.free(children)
        assert_nothing_is_held(running)


# ---- what is sent


def lose_one(client: Any, fake: Any) -> str:
    fake.will("Allocate", TOO_LATE)
    with pytest.raises(DeadlineExceededError):
        client.sequence([1])
    return fake.requests["Allocate"][-1].request_id


def asked(fake: Any) -> list[list[str]]:
    return [list(request.request_ids) for request in fake.requests["Free"]]


def test_lost_sequences_are_freed_in_one_call_and_then_forgotten(client, fake):
    fake.will("Free", InternalError("broken"))
    first = lose_one(client, fake)
    second = lose_one(client, fake)
    client.lookup([1])
    client.lookup([1])
    assert asked(fake) == [[first], [first, second]]
    assert {request.owner for request in fake.requests["Free"]} == {
        fake.requests["Allocate"][0].owner
    }


def test_a_free_that_fails_fails_no_other_call_and_is_made_again(client, fake):
    name = lose_one(client, fake)
    fake.will("Free", InternalError("broken"), TOO_LATE)
    for _ in range(4):
        client.lookup([1])
    assert asked(fake) == [[name]] * 3


def test_a_free_without_an_answer_holds_no_other_call_up_for_long(client, fake, haste):
    lose_one(client, fake)
    fake.will("Free", HANG)
    started = time.monotonic()
    client.lookup([1])
    assert time.monotonic() - started < DEFAULT_TIMEOUT_S / 2


def test_a_client_closes_while_the_daemon_is_gone(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        lose_one(client, fake)
        fake.stop()
    assert asked(fake) == []


def test_a_client_whose_channel_is_closed_already_closes(fake):
    with grpc.insecure_channel(fake.target, channel_options()) as channel:
        client = Client(channel=channel)
        lose_one(client, fake)
    client.close()
    assert asked(fake) == []


def test_an_async_client_whose_channel_is_closed_already_closes(fake):
    async def main() -> None:
        async with grpc.aio.insecure_channel(fake.target, channel_options()) as channel:
            client = AsyncClient(channel=channel)
            fake.will("Allocate", TOO_LATE)
            with pytest.raises(DeadlineExceededError):
                await client.sequence([1])
        await client.close()

    asyncio.run(main())
    assert asked(fake) == []


def test_what_a_cancelled_task_leaves_behind_is_kept_until_a_free_succeeds(fake):
    answered = threading.Event()

    def allocate(request: Any) -> Any:
        answered.wait(WAIT_S)
        return allocated(7)

    async def main() -> None:
        async with AsyncClient(fake.target) as client:
            await client.server_info()
            fake.will("Allocate", allocate)
            fake.will("Free", InternalError("broken"))
            task = asyncio.ensure_future(open_one(client))
            await until_async(lambda: fake.requests["Allocate"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answered.set()
            await until_async(lambda: fake.requests["Free"])
            await client.lookup([1])

    async def open_one(client: AsyncClient) -> None:
        await client.sequence([1])

    asyncio.run(main())
    name = fake.requests["Allocate"][0].request_id
    assert asked(fake) == [[name]] * 2


def test_what_the_daemon_has_refused_is_not_lost(client, fake):
    fake.will("Allocate", NoRoomError(needed=1, free=0, referenced=9))
    with pytest.raises(NoRoomError):
        client.sequence([1])
    client.lookup([1])
    assert asked(fake) == []


def test_a_daemon_that_does_not_answer_for_request_ids_fails_no_call(client, fake):
    name = lose_one(client, fake)
    fake.will("Free", cache_pb2.FreeResponse())
    client.lookup([1])
    client.lookup([1])
    assert asked(fake)[0] == [name]


# ---- how long they are kept


class Lost:
    """A client's lost requests, and the time."""

    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.requests = LostRequests(b"o" * 16, lambda: self.now_s)
        self.requests.add(names)

    def names(self) -> list[str]:
        return [lost.request_id for lost in self.requests.due()]

    def answer(self, *codes: ResultCode) -> None:
        reply = twin("FreeResponse")(result_codes=column32(codes))
        self.requests.answered(self.requests.due(), reply)


def test_a_name_that_the_daemon_does_not_know_is_asked_for_three_times_more():
    lost = Lost("r")
    for wait_s in (0.1, 1.0, 10.0):
        lost.answer(UNKNOWN)
        assert lost.names() == [], "the call may still be running in the daemon"
        assert len(lost.requests.all()) == 1
        lost.now_s += wait_s
        assert lost.names() == ["r"]
    lost.answer(UNKNOWN)
    assert lost.requests.all() == []


def test_each_name_is_kept_until_it_is_answered():
    lost = Lost("a", "b", "c")
    lost.answer(OK, UNKNOWN, OK)
    lost.requests.add(["d"])
    assert lost.names() == ["d"]
    lost.now_s += 0.1
    assert lost.names() == ["b", "d"]
    lost.answer(OK, OK)
    assert lost.requests.all() == []


def test_threads_that_ask_at_the_same_time_count_as_one():
    lost = Lost("r")
    both = lost.requests.due()
    unknown, ok = (twin("FreeResponse")(result_codes=column32([code])) for code in (UNKNOWN, OK))
    for _ in range(4):
        lost.requests.answered(both, unknown)
    lost.now_s += 0.1
    assert lost.names() == ["r"]
    lost.answer(OK)
    lost.requests.answered(both, ok)
    assert lost.requests.all() == []
