"""Clients open a session with their first sequence, keep it alive, and notice when it is lost."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from prefixcache import AsyncClient, Client
from prefixcache.client.channel import DEFAULT_SESSION_TTL_S
from prefixcache.core.sessions import SessionLimits
from prefixcache.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    SessionLostError,
    SessionNotFoundError,
    TooManySessionsError,
)
from prefixcache.rpc._pb import cache_pb2, session_pb2
from prefixcache.server.daemon import CacheOptions
from prefixcache.types import ResultCode
from tests.client.fake_daemon import (
    BOOT_ID,
    END,
    HANG,
    SESSION_ID,
    FakeDaemon,
    allocated,
    info_reply,
)
from tests.client.twins import open_client, until_meanwhile
from tests.support.daemon import RunningDaemon, running_daemon, sweeper
from tests.support.invariants import check_invariants
from tests.support.proxy import proxy_to
from tests.support.waiting import WAIT_S, until, until_async

OTHER_BOOT = bytes(reversed(BOOT_ID))
OTHER_ID = bytes(reversed(SESSION_ID))
GONE = SessionNotFoundError("0123456789abcdef")


@pytest.fixture
def client(client_kind: str, fake: FakeDaemon) -> Iterator[Any]:
    with open_client(client_kind, fake.target) as opened:
        yield opened


def session(
    session_id: bytes = SESSION_ID, ttl_s: float = 60.0, boot_id: bytes = BOOT_ID
) -> session_pb2.OpenSessionResponse:
    return session_pb2.OpenSessionResponse(session_id=session_id, ttl_s=ttl_s, boot_id=boot_id)


def wait_for_beats(client: Any, fake: FakeDaemon, count: int) -> None:
    """Calls meanwhile, since the event loop of an async client runs in its calls only."""

    def have_come() -> bool:
        client.lookup([1])
        return len(fake.requests["KeepAlive"]) >= count

    until(have_come)


# ---- opening


def test_the_first_sequence_opens_a_session_that_owns_it_and_the_next(client, fake):
    client.lookup([1])
    client.stats()
    client.list_sequences()
    assert not fake.requests["OpenSession"]
    for number in (7, 8):
        fake.will("Allocate", allocated(number, blocks=(0,)))
        client.sequence([1]).truncate(1)
    assert len(fake.requests["OpenSession"]) == 1
    calls = fake.requests["Allocate"] + fake.requests["Truncate"]
    assert {call.owner for call in calls} == {SESSION_ID}


def test_the_session_is_asked_for_as_the_client_was_told(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        client.sequence([1])
    with open_client(client_kind, fake.target, session_ttl_s=5, client_name="engine 3") as client:
        client.sequence([1])
    first, second = fake.requests["OpenSession"]
    assert (first.ttl_s, first.client_name) == (DEFAULT_SESSION_TTL_S, "")
    assert (second.ttl_s, second.client_name) == (5.0, "engine 3")
    assert len(first.request_id) == 32
    assert first.request_id != second.request_id


def test_without_a_session_the_owner_is_the_clients_own(client_kind, fake):
    with open_client(client_kind, fake.target, session_ttl_s=None) as client:
        client.sequence([1])
    assert not {"OpenSession", "KeepAlive", "CloseSession"} & {*fake.requests}
    assert len(fake.requests["Allocate"][0].owner) == 16


def test_a_bad_argument_opens_no_session(client, fake):
    with pytest.raises(InvalidArgumentError):
        client.sequence([-1])
    assert not fake.requests["OpenSession"]


def test_a_session_that_was_opened_without_a_reply_is_asked_for_by_the_same_key(client, fake):
    fake.will("OpenSession", grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(DeadlineExceededError):
        client.sequence([1])
    client.sequence([1])
    first, second = fake.requests["OpenSession"]
    assert first == second


def test_a_daemon_with_too_many_sessions_refuses_the_sequence(client, fake):
    fake.will("OpenSession", TooManySessionsError(256))
    with pytest.raises(TooManySessionsError):
        client.sequence([1])
    assert not fake.requests["Allocate"]
    client.sequence([1])


def test_threads_that_begin_at_the_same_time_open_one_session(fake):
    arrived = threading.Barrier(8)

    def begin() -> None:
        arrived.wait()
        client.sequence([1])

    with Client(fake.target) as client, ThreadPoolExecutor(8) as threads:
        client.server_info()
        for done in [threads.submit(begin) for _ in range(8)]:
            done.result()
    assert len(fake.requests["OpenSession"]) == 1


@contextmanager
def opening_that_fails_later(fake: FakeDaemon) -> Iterator[threading.Event]:
    """The first session gets an answer once the event is set: that the deadline has passed."""
    fails = threading.Event()

    def outcome(request: Any) -> Any:
        assert fails.wait(WAIT_S)
        return grpc.StatusCode.DEADLINE_EXCEEDED

    fake.will("OpenSession", outcome)
    try:
        yield fails
    finally:
        fails.set()


def test_a_thread_waits_for_anothers_opening_no_longer_than_its_own_timeout(fake):
    with (
        Client(fake.target, timeout_s=WAIT_S) as client,
        ThreadPoolExecutor(1) as threads,
        opening_that_fails_later(fake) as fails,
    ):
        client.server_info()
        first = threads.submit(client.sequence, [1])
        until(lambda: fake.requests["OpenSession"])
        with pytest.raises(DeadlineExceededError, match=r"still opening its session after 0.1 s"):
            client.sequence([2], timeout_s=0.1)
        assert not first.done()
        fails.set()
        with pytest.raises(DeadlineExceededError):
            first.result()
        client.sequence([3])


def test_a_task_waits_for_anothers_opening_no_longer_than_its_own_timeout(fake):
    async def main(fails: threading.Event) -> None:
        async with AsyncClient(fake.target, timeout_s=WAIT_S) as client:
            await client.server_info()
            first = asyncio.ensure_future(client.sequence([1]))
            await until_async(lambda: fake.requests["OpenSession"])
            with pytest.raises(DeadlineExceededError, match=r"still opening its session after 0.1"):
                await client.sequence([2], timeout_s=0.1)
            assert not first.done()
            fails.set()
            with pytest.raises(DeadlineExceededError):
                await first
            await client.sequence([3])

    with opening_that_fails_later(fake) as fails:
        asyncio.run(main(fails))


# ---- beats


def test_the_daemon_hears_of_a_session_before_there_is_a_sequence_in_it(client, fake):
    """So that it notices the end of a client that is killed right after its first call."""
    client.sequence([1])
    names = list(fake.requests)
    assert names.index("OpenSession") < names.index("KeepAlive") < names.index("Allocate")


@pytest.mark.parametrize("beat", [HANG, InternalError("broken")], ids=["silent", "broken"])
def test_a_first_beat_that_gets_no_answer_holds_nothing_up_for_long(client, fake, haste, beat):
    fake.will("KeepAlive", beat)
    fake.will("Allocate", allocated(7))
    assert client.sequence([1]).sequence_id == 7


def test_beats_come_three_times_in_a_ttl_on_one_stream(client, fake):
    fake.will("OpenSession", session(ttl_s=0.3))
    client.sequence([1])
    wait_for_beats(client, fake, 4)
    assert {request.session_id for request in fake.requests["KeepAlive"]} == {SESSION_ID}


@pytest.mark.parametrize(
    "end", [END, grpc.StatusCode.UNAVAILABLE, InternalError("broken")], ids=["end", "gone", "bug"]
)
def test_a_stream_that_breaks_is_opened_again_at_once(client, fake, end):
    fake.will("KeepAlive", end, end)
    client.sequence([1])
    # The interval of the beats is 20 s.
    wait_for_beats(client, fake, 3)


def test_a_broken_stream_is_noticed_between_two_beats(client_kind):
    with (
        running_daemon(CacheOptions(16, 4), None, None, SessionLimits(max_sessions=2)) as running,
        proxy_to(running.target) as proxy,
        open_client(client_kind, proxy.target) as client,
    ):
        sequence = client.sequence([1])

        def is_connected() -> bool:
            client.lookup([1])
            (info,) = client.list_sessions()
            return info.is_connected

        until(is_connected)
        proxy.cut()
        until(lambda: proxy.num_connections == 2 or client.lookup([1]) is None)
        until(is_connected)
        assert sequence.append([2]).code is ResultCode.OK


# ---- loss


def lose_by_a_call(client: Any, fake: FakeDaemon, sequence: Any) -> None:
    fake.will("Truncate", GONE)
    with pytest.raises(SessionLostError):
        sequence.truncate(1)


def lose_by_a_beat(client: Any, fake: FakeDaemon, sequence: Any) -> None:
    until(lambda: client.lookup([1]) is not None and is_lost(sequence))


def lose_by_the_description(client: Any, fake: FakeDaemon, sequence: Any) -> None:
    fake.will("GetServerInfo", info_reply(boot_id=OTHER_BOOT))
    client.server_info()


def is_lost(sequence: Any) -> bool:
    return bool(sequence._lease.is_lost)


WAYS: dict[str, tuple[Any, Callable[..., None]]] = {
    "a call": (None, lose_by_a_call),
    "a beat": (GONE, lose_by_a_beat),
    "a beat of another boot": (
        session_pb2.KeepAliveResponse(ttl_s=60, boot_id=OTHER_BOOT),
        lose_by_a_beat,
    ),
    "the description": (None, lose_by_the_description),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_call_on_a_sequence_travels_once_its_session_is_lost(client, fake, way):
    beat, lose = WAYS[way]
    if beat is not None:
        fake.will("OpenSession", session(ttl_s=0.3))
        fake.will("KeepAlive", session_pb2.KeepAliveResponse(ttl_s=0.3, boot_id=BOOT_ID), beat)
    fake.will("Allocate", allocated(7, blocks=(0,)))
    sequence = client.sequence([1, 2])
    lose(client, fake, sequence)
    before = {name: len(calls) for name, calls in fake.requests.items() if name != "Lookup"}
    for call in (
        lambda: sequence.append([3]),
        lambda: sequence.commit(1),
        lambda: sequence.fork(),
        lambda: sequence.truncate(1),
        lambda: client.append([sequence], [[3]]),
        lambda: client.commit([sequence], [1]),
    ):
        with pytest.raises(SessionLostError) as caught:
            call()
    restarted = way in ("a beat of another boot", "the description")
    assert ("the daemon was restarted" in str(caught.value)) == restarted
    assert client.free([sequence]) == [ResultCode.NOT_FOUND]
    assert sequence.is_freed
    with sequence:
        pass
    assert {n: len(c) for n, c in fake.requests.items() if n != "Lookup"} == before


def test_a_daemon_of_another_boot_is_told_by_the_refusal(client, fake, haste):
    fake.will("OpenSession", session(boot_id=OTHER_BOOT))
    fake.will("Allocate", allocated(7, blocks=(0,)))
    fake.will("KeepAlive", HANG)
    sequence = client.sequence([1])
    fake.will("Truncate", GONE)
    with pytest.raises(SessionLostError, match="the daemon was restarted"):
        sequence.truncate(1)


def test_the_end_of_a_block_says_nothing_of_a_session_that_is_lost(client, fake):
    fake.will("Allocate", allocated(7, blocks=(0,)))
    fake.will("Free", GONE)
    with client.sequence([1]) as sequence:
        pass
    assert sequence.is_freed
    with pytest.raises(SessionLostError):
        sequence.append([2])


def test_a_new_sequence_opens_another_session(client, fake):
    fake.will("OpenSession", session(), session(OTHER_ID))
    fake.will("Allocate", allocated(7, blocks=(0,)), allocated(8, blocks=(0,)))
    old = client.sequence([1])
    lose_by_a_call(client, fake, old)
    new = client.sequence([1])
    assert fake.requests["Allocate"][-1].owner == OTHER_ID
    # One call is of one session.
    with pytest.raises(SessionLostError):
        client.append([new, old], [[1], [1]])
    fake.will("Free", cache_pb2.FreeResponse(result_codes=[ResultCode.OK]))
    assert client.free([old, new]) == [ResultCode.NOT_FOUND, ResultCode.OK]
    assert list(fake.requests["Free"][-1].sequence_ids) == [8]


def test_a_sequence_for_which_the_session_came_too_late_is_made_in_another(client, fake):
    """The client stood still and has not noticed yet."""
    fake.will("OpenSession", session(), session(OTHER_ID))
    fake.will("Allocate", allocated(7), GONE, allocated(8))
    old = client.sequence([1])
    assert client.sequence([1]).sequence_id == 8
    first, second, third = fake.requests["Allocate"]
    assert (first.owner, second.owner, third.owner) == (SESSION_ID, SESSION_ID, OTHER_ID)
    assert second.request_id == third.request_id
    with pytest.raises(SessionLostError):
        old.append([1])


def test_steps_of_a_lost_session_say_so(client_kind):
    with (
        running_daemon(CacheOptions(16, 4)) as running,
        open_client(client_kind, running.target) as client,
        client.steps() as steps,
    ):
        sequence = client.sequence([1])
        step = steps.new_step()
        row, made = step.append([sequence], [[2]]), step.sequence([3])
        with running.daemon.sequences.lock:
            (lease,) = list(running.daemon.sequences.live.sessions)
            running.daemon.sequences.live.close_session(lease.session_id)
        steps.run(step)
        for result in (row, made):
            with pytest.raises(SessionLostError):
                result.result()
        with pytest.raises(SessionLostError):
            steps.new_step().sequence([1])
        with client.steps() as others, client.sequence([1]) as new:
            later = others.new_step()
            with pytest.raises(SessionLostError):
                later.append([sequence], [[1]])
            later.append([new], [[1]])
            others.run(later)


def test_a_request_that_is_lost_with_its_session_is_not_asked_for(client, fake):
    fake.will("Allocate", allocated(7), grpc.StatusCode.DEADLINE_EXCEEDED)
    sequence = client.sequence([1])
    with pytest.raises(DeadlineExceededError):
        client.sequence([1])
    fake.will("Free", GONE)
    client.lookup([1])
    client.lookup([1])
    assert len(fake.requests["Free"]) == 1
    assert is_lost(sequence)


# ---- the end


def test_closing_a_client_closes_its_session(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        client.sequence([1])
    (request,) = fake.requests["CloseSession"]
    assert request.session_id == SESSION_ID
    assert not fake.requests["Free"]


def test_a_client_without_sequences_closes_nothing(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        client.lookup([1])
    assert not fake.requests["CloseSession"]


def test_a_client_that_has_lost_its_session_closes_nothing(client_kind, fake):
    fake.will("Allocate", allocated(7))
    with open_client(client_kind, fake.target) as client:
        lose_by_a_call(client, fake, client.sequence([1, 2]))
    assert not fake.requests["CloseSession"]


@pytest.mark.parametrize(
    "answer", [HANG, InternalError("broken"), GONE], ids=["none", "broken", "gone"]
)
def test_a_client_closes_whatever_the_daemon_says(client_kind, fake, haste, answer):
    fake.will("CloseSession", answer)
    with open_client(client_kind, fake.target) as client:
        client.sequence([1])
    until(lambda: len(fake.requests["CloseSession"]) == 1)


def test_a_client_closes_while_the_daemon_is_gone(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        client.sequence([1])
        fake.stop()


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "session-keeper"]


@pytest.mark.parametrize("beat", [None, HANG], ids=["idle", "waiting"])
def test_no_thread_is_left_after_close(fake, haste, beat):
    if beat is not None:
        fake.will("KeepAlive", beat)
    for _ in range(3):
        with Client(fake.target) as client:
            client.sequence([1])
            assert keepers()
    until(lambda: not keepers())


def test_a_keeper_ends_with_a_channel_of_the_callers(fake):
    with grpc.insecure_channel(fake.target) as channel:
        client = Client(channel=channel)
        client.sequence([1])
    until(lambda: not keepers())
    client.close()


@contextmanager
def swept(running: RunningDaemon) -> Iterator[None]:
    sweeps = sweeper(running)
    sweeps.start()
    try:
        yield
    finally:
        sweeps.stop()


def test_what_a_forgotten_client_held_is_freed() -> None:
    with running_daemon(CacheOptions(16, 4)) as running, swept(running):
        client = Client(running.target)
        client.sequence([1])
        live = running.daemon.sequences.live
        assert (len(live), len(live.sessions)) == (1, 1)
        del client
        gc.collect()
        until(lambda: not len(live) and not len(live.sessions))
    until(lambda: not keepers())


# ---- with the real daemon


def test_a_session_outlives_its_ttl_while_its_client_lives(client_kind):
    now_s = [0.0]
    with (
        running_daemon(CacheOptions(16, 4), clock=lambda: now_s[0]) as running,
        open_client(client_kind, running.target, session_ttl_s=1.0, client_name="me") as client,
    ):
        sequence = client.sequence([1])

        def num_beats() -> int:
            return running.server.call_counts["KeepAlive"].read().durations.count

        for _ in range(4):
            now_s[0] += 0.9
            running.sweep()
            before = num_beats()
            # The first one may have begun before.
            until_meanwhile(client, lambda before=before: num_beats() >= before + 2)
        assert sequence.append([2]).code is ResultCode.OK
        (info,) = client.list_sessions()
        assert (info.ttl_s, info.num_sequences, info.is_connected) == (1.0, 1, True)
        assert client.list_sequences()[0].client_name == "me"
        assert client.list_sequences()[0].owner_digest == info.owner_digest
        assert client.stats().sessions == 1
    assert len(running.daemon.sequences.live.sessions) == 0


def test_closing_frees_what_was_not_freed(client_kind):
    with running_daemon(CacheOptions(16, 4)) as running:
        with open_client(client_kind, running.target) as client:
            parent = client.sequence(range(6))
            parent.commit(6)
            parent.fork(2)
            assert client.stats().sequences == 3
        stats = running.daemon.sequences.stats()
        assert (stats.sequences, stats.sessions, stats.referenced) == (0, 0, 0)


def test_a_request_id_is_free_again_after_its_sequence(client_kind):
    """A preempted request comes back under its name."""
    with (
        running_daemon(CacheOptions(16, 4)) as running,
        open_client(client_kind, running.target) as client,
    ):
        client.sequence([1], request_id="q").free()
        client.sequence([1], request_id="q", resumed=True).free()


def test_calls_whose_deadlines_pass_leave_nothing_behind(client_kind):
    rng = random.Random(7)
    num_calls = num_late = 0
    with (
        running_daemon(CacheOptions(64, 4)) as running,
        open_client(client_kind, running.target) as client,
    ):
        client.sequence([1]).free()
        # How many are late is the machine's business.
        while num_calls < 200 or (num_late <= 10 and num_calls < 10_000):
            num_calls += 1
            made = []
            with suppress(DeadlineExceededError):
                num_late += 1
                timeout_s = rng.choice((0.0001, 0.0005, 0.001, 0.005))
                made.append(client.sequence(range(30), timeout_s=timeout_s))
                made[0].commit(30 - made[0].num_cached_tokens, timeout_s=timeout_s)
                made += made[0].fork(2, timeout_s=timeout_s)
                num_late -= 1
            client.free(made)
        assert num_late > 10
        # What nobody has a handle of is freed ahead of later calls.
        sequences = running.daemon.sequences
        until(lambda: client.lookup([1]) is not None and len(sequences.live) == 0)
        with sequences.lock:
            check_invariants(sequences)
            assert sequences.pool.num_referenced == 0
