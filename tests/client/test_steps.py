"""Steps of an engine on one stream, in both clients: results, order, what a broken one leaves."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from prefixcache import AsyncClient, Client, Pending, Sequence, Step
from prefixcache.client.channel import DEFAULT_TIMEOUT_S
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    DrainingError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NoRoomError,
    PrefixCacheError,
    SequenceNotFoundError,
    TooManyStreamsError,
    UnavailableError,
)
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions, LimitOptions
from prefixcache.types import CommitResult, ResultCode
from tests.client.fake_daemon import END, HANG, allocated, fake_daemon
from tests.client.twins import once_it_is_back, open_client, until_meanwhile
from tests.support.arrivals import Arrivals
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants
from tests.support.waiting import WAIT_S, until, until_async

OK, NOT_FOUND = ResultCode.OK, ResultCode.NOT_FOUND


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.fixture
def running(arrivals: Arrivals) -> Iterator[RunningDaemon]:
    limits = LimitOptions(max_step_streams=1)
    with running_daemon(CacheOptions(16, 4), limits=limits, tracing=arrivals) as daemon:
        yield daemon


@pytest.fixture
def real(client_kind: str, running: RunningDaemon) -> Iterator[Any]:
    with open_client(client_kind, running.target) as opened:
        yield opened


def made(steps: Any, *prompts: Any) -> list[Any]:
    step = steps.new_step()
    pending = [step.sequence(prompt) for prompt in prompts]
    steps.run(step)
    return [one.result() for one in pending]


def assert_stands_as_in_the_daemon(running: RunningDaemon, *sequences: Any) -> None:
    records = {one.sequence_id: one for one in running.daemon.sequences.live.all_holders()}
    for sequence in sequences:
        record = records[sequence.sequence_id]
        assert sequence.num_tokens == record.num_tokens
        assert sequence.num_computed_tokens == record.num_computed
        assert sequence.block_ids.tolist() == record.blocks().tolist()
    with running.daemon.sequences.lock:
        check_invariants(running.daemon.sequences)


# ---- results


def test_a_step_makes_sequences_and_advances_them(real, running):
    with real.steps() as steps:
        first, second, third = made(steps, range(6), range(50, 55), [9])
        step = steps.new_step()
        appended = step.append([first, second], [[6, 7, 8], [55]], [0, 0], [0, 2])
        new = step.sequence(range(7), num_lookahead_tokens=3)
        committed = step.commit([first, second], [6, 2])
        freed = step.free([third])
        steps.run(step)
        assert freed.result() == [OK]
        assert third.is_freed
        assert committed.result() == [CommitResult(OK, 1), CommitResult(OK, 0)]
        assert [len(row.new_block_ids) for row in appended.result()] == [1, 0]
        sequence = new.result()
        assert sequence.num_cached_tokens == 4
        assert (first.num_tokens, first.num_computed_tokens) == (9, 6)
        assert (second.num_tokens, second.num_computed_tokens) == (6, 2)
        assert_stands_as_in_the_daemon(running, first, second, sequence)
        # They are sequences like any other.
        first.commit(3)
        sequence.append([1])
        assert_stands_as_in_the_daemon(running, first, second, sequence)
        real.free([first, second, sequence])


def test_the_results_are_those_of_the_calls_one_by_one(client_kind):
    def by_step(client: Any) -> list[Any]:
        results: list[Any] = []
        with client.steps() as steps:
            first, second = made(steps, range(6), range(4))
            for _ in range(5):
                step = steps.new_step()
                committed = step.commit([first, second], [1, 5])
                appended = step.append([second, first], [[1, 2], [3]])
                steps.run(step)
                results += [committed.result(), appended.result()]
            return [*results, first.block_ids.tolist(), second.block_ids.tolist()]

    def one_by_one(client: Any) -> list[Any]:
        results: list[Any] = []
        first, second = client.sequence(range(6)), client.sequence(range(4))
        for _ in range(5):
            results.append(client.commit([first, second], [1, 5]))
            results.append(client.append([second, first], [[1, 2], [3]]))
        return [*results, first.block_ids.tolist(), second.block_ids.tolist()]

    def on_a_daemon_of_its_own(calls: Callable[[Any], list[Any]]) -> list[Any]:
        with (
            running_daemon(CacheOptions(16, 4)) as running,
            open_client(client_kind, running.target) as client,
        ):
            return calls(client)

    assert on_a_daemon_of_its_own(by_step) == on_a_daemon_of_its_own(one_by_one)


def test_a_copy_is_told_and_taken_into_the_table(real, running):
    with real.sequence(range(6)) as parent, real.steps() as steps:
        parent.commit(6)
        (child,) = parent.fork()
        step = steps.new_step()
        appended = step.append([child], [[6]])
        steps.run(step)
        (row,) = appended.result()
        assert row.copies[0].source == parent.block_ids[1]
        assert row.copies[0].destination == child.block_ids[1] != parent.block_ids[1]
        assert_stands_as_in_the_daemon(running, parent, child)


def test_a_refused_call_raises_its_error_and_the_others_are_done(real, running):
    with real.steps() as steps:
        (held,) = made(steps, range(50))
        step = steps.new_step()
        refused = step.sequence(range(100, 140))
        appended = step.append([held], [[50]])
        fits = step.sequence([1])
        steps.run(step)
        with pytest.raises(NoRoomError) as caught:
            refused.result()
        assert caught.value.fields["needed"] == "10"
        assert caught.value.fields["boot_id"] == running.daemon.boot_id.hex()
        assert appended.result()[0].code is OK
        assert fits.result().num_tokens == 1
        assert len(running.daemon.sequences.live) == 2


def test_a_refused_row_says_why_and_stands_where_it_stood(real, running):
    with real.steps() as steps:
        (sequence,) = made(steps, range(6))
        step = steps.new_step()
        committed = step.commit([sequence], [7])
        steps.run(step)
        assert committed.result()[0].code is ResultCode.BEYOND_TOKENS
        assert_stands_as_in_the_daemon(running, sequence)
        real.free([sequence])
        step = steps.new_step()
        appended = step.append([sequence], [[1]])
        steps.run(step)
        assert appended.result()[0].code is NOT_FOUND
        with pytest.raises(SequenceNotFoundError):
            sequence.append([1])


def test_an_empty_step_is_answered(real):
    with real.steps() as steps:
        steps.run(steps.new_step())
        steps.run(steps.new_step())


# ---- order


def test_no_result_is_there_before_the_answer(real):
    with real.steps() as steps:
        step = steps.new_step()
        pending = step.sequence([1])
        with pytest.raises(FailedPreconditionError, match="has not been answered"):
            pending.result()
        steps.send(step)
        with pytest.raises(FailedPreconditionError, match="has not been answered"):
            pending.result()
        steps.wait(step)
        assert pending.result().num_tokens == 1


def test_steps_are_sent_ahead_and_a_wait_answers_those_before(real, running):
    with real.steps() as steps:
        halves = [made(steps, [1], [2]), made(steps, [3], [4])]
        for _ in range(10):
            sent, results = [], []
            for half in halves:
                step = steps.new_step()
                step.commit(half, [1, 1])
                results.append(step.append(half, [[5], [6]]))
                steps.send(step)
                sent.append(step)
            steps.wait(sent[1])
            assert [row.code for result in results for row in result.result()] == [OK] * 4
            steps.wait(sent[0])
        assert [one.num_tokens for half in halves for one in half] == [11] * 4
        assert_stands_as_in_the_daemon(running, *halves[0], *halves[1])


def test_engines_at_the_same_time_share_the_pool_and_leave_it_whole():
    """Each on a stream of its own, two steps under way, in a pool that is too small for all."""

    def engine(target: str, number: int) -> int:
        rng, num_refused = random.Random(number), 0
        with Client(target) as client, client.steps() as steps:
            groups: list[list[Sequence]] = [[], []]
            under_way: list[tuple[int, Step[Sequence], list[Pending[Sequence]]]] = []
            for turn in range(60):
                which = turn % 2
                if len(under_way) == 2:
                    index, step, started = under_way.pop(0)
                    steps.wait(step)
                    for one in started:
                        try:
                            groups[index].append(one.result())
                        except NoRoomError:
                            num_refused += 1
                group = groups[which]
                step = steps.new_step()
                step.free([group.pop()] if group and rng.random() < 0.6 else [])
                step.commit(group, [one.num_tokens - one.num_computed_tokens for one in group])
                step.append(group, [[rng.randrange(3)]] * len(group))
                prompts = [range(rng.randrange(1, 20)) for _ in range(rng.randrange(3))]
                under_way.append((which, step, [step.sequence(prompt) for prompt in prompts]))
                steps.send(step)
            for index, step, started in under_way:
                steps.wait(step)
                for one in started:
                    with suppress(NoRoomError):
                        groups[index].append(one.result())
            assert client.free(groups[0] + groups[1]) == [OK] * len(groups[0] + groups[1])
        return num_refused

    with running_daemon(CacheOptions(12, 4)) as running, ThreadPoolExecutor(4) as threads:
        num_refused = list(threads.map(engine, [running.target] * 4, range(4)))
        assert any(num_refused)
        with running.daemon.sequences.lock:
            check_invariants(running.daemon.sequences)
            assert len(running.daemon.sequences.live) == 0
            assert running.daemon.sequences.pool.num_referenced == 0


def test_a_step_has_each_call_once_and_is_sent_once(real):
    with real.steps() as steps:
        first, second = made(steps, [1], [2])
        step = steps.new_step()
        step.free([first])
        step.commit([second], [1])
        step.append([second], [[3]])
        for again in (
            lambda: step.free([second]),
            lambda: step.commit([first], [0]),
            lambda: step.append([first], [[1]]),
        ):
            with pytest.raises(FailedPreconditionError, match="already"):
                again()
        with pytest.raises(FailedPreconditionError, match="was not sent"):
            steps.wait(step)
        steps.run(step)
        for late in (
            lambda: steps.send(step),
            lambda: step.sequence([1]),
            lambda: step.free([second]),
        ):
            with pytest.raises(FailedPreconditionError, match="was sent before"):
                late()
        steps.wait(step)


def test_a_sequence_is_in_one_unanswered_step_at_most(real, running):
    with real.steps() as steps:
        first, second = made(steps, [1], [2])
        one, other = steps.new_step(), steps.new_step()
        one.append([first], [[3]])
        other.append([first], [[3]])
        steps.send(one)
        with pytest.raises(FailedPreconditionError, match="no answer yet"):
            steps.new_step().commit([second, first], [0, 0])
        with pytest.raises(FailedPreconditionError, match="another call"):
            steps.send(other)
        steps.wait(one)
        # It would pass for a repeat of the first, and count twice here.
        with pytest.raises(FailedPreconditionError, match="another call"):
            steps.send(other)
        assert_stands_as_in_the_daemon(running, first, second)


@pytest.mark.parametrize("added", ["commit", "append"])
def test_a_step_whose_sequence_has_gone_on_is_not_sent(added, real, running):
    with real.steps() as steps:
        (sequence,) = made(steps, range(6))
        step = steps.new_step()
        if added == "commit":
            step.commit([sequence], [2])
            sequence.commit(2)
        else:
            step.append([sequence], [[1]])
            sequence.append([1])
        with pytest.raises(FailedPreconditionError, match="another call"):
            steps.send(step)
        assert_stands_as_in_the_daemon(running, sequence)
        made(steps, [1])


def test_a_step_belongs_to_its_stream(client_kind):
    with (
        running_daemon(CacheOptions(16, 4)) as running,
        open_client(client_kind, running.target) as client,
        client.steps() as one,
        client.steps() as other,
    ):
        with pytest.raises(FailedPreconditionError, match="another stream"):
            other.send(one.new_step())
        # What one has made the other can use.
        (sequence,) = made(one, [1])
        step = other.new_step()
        step.append([sequence], [[2]])
        other.run(step)
        assert_stands_as_in_the_daemon(running, sequence)


def test_what_cannot_be_sent_is_no_part_of_the_step(real):
    with real.steps() as steps:
        (sequence,) = made(steps, [1])
        step = steps.new_step()
        for bad in (
            lambda: step.append([sequence], [[-1]]),
            lambda: step.append([sequence, sequence], [[1], [1]]),
            lambda: step.commit([sequence], [1, 2]),
            lambda: step.sequence([2**32]),
        ):
            with pytest.raises(InvalidArgumentError):
                bad()
        appended = step.append([sequence], [[2]])
        steps.run(step)
        assert appended.result()[0].code is OK


def test_a_step_makes_as_many_sequences_as_the_daemon_takes(client, fake):
    with client.steps() as steps:
        step = steps.new_step()
        for _ in range(3):
            step.sequence([1])
        with pytest.raises(InvalidArgumentError) as caught:
            step.sequence([1])
        assert caught.value.field == "allocates"


# ---- a stream that ends


def lost_of(fake: Any) -> list[str]:
    return [name for request in fake.requests["Free"] for name in request.request_ids]


def names_in(step_request: Any) -> list[str]:
    return [part.request_id for part in step_request.allocates]


def assert_failed_with(error: type[PrefixCacheError], steps: Any, *pending: Any) -> None:
    for one in pending:
        with pytest.raises(error):
            one.result()
    for late in (lambda: steps.send(steps.new_step()), lambda: steps.run(steps.new_step())):
        with pytest.raises(error):
            late()


def stopping(fake: Any) -> Callable[[Any], Any]:
    """An outcome: the daemon goes while it has the request."""

    def outcome(request: Any) -> Any:
        threading.Thread(target=fake.stop).start()
        return HANG

    return outcome


def test_steps_without_an_answer_fail_with_the_daemon(client_kind, tmp_path):
    address = f"unix:{tmp_path / 'd.sock'}"
    with open_client(client_kind, address) as client:
        with fake_daemon(address) as fake, client.steps() as steps:
            answered = cache_pb2.StepResponse(allocates=[allocated(7, blocks=(0,))])
            fake.will("Step", answered, stopping(fake))
            sent, pending = [], []
            for number in range(3):
                step = steps.new_step()
                pending.append(step.sequence([number]))
                steps.send(step)
                sent.append(step)
            steps.wait(sent[0])
            for step in (sent[2], sent[1], sent[2]):
                with pytest.raises(UnavailableError):
                    steps.wait(step)
            assert pending[0].result().sequence_id == 7
            assert_failed_with(UnavailableError, steps, *pending[1:])
            steps.wait(sent[0])
            requests = fake.requests["Step"]
            assert len(requests) == 2
        with fake_daemon(address) as second:
            once_it_is_back(client.stats)
            lost = lost_of(second)
            assert lost[0] == names_in(requests[1])[0] and len(set(lost)) == 2


def test_an_answer_that_is_late_breaks_the_stream(client, fake):
    with client.steps() as steps:
        steps.run(steps.new_step(), timeout_s=WAIT_S)
        fake.will("Step", HANG)
        step = steps.new_step()
        pending, mine = step.sequence([1]), step.sequence([2], request_id="mine")
        steps.send(step)
        until_meanwhile(client, lambda: len(fake.requests["Step"]) == 2)
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            steps.wait(step, timeout_s=0.3)
        assert time.monotonic() - started < DEFAULT_TIMEOUT_S / 2
        assert_failed_with(DeadlineExceededError, steps, pending, mine)
        # Another stream has nothing to do with it, and frees what this one may have made.
        with client.steps() as others:
            others.run(others.new_step())
        (name,) = lost_of(fake)
        assert name == names_in(fake.requests["Step"][1])[0] != "mine"


def test_a_wait_has_the_time_limit_of_the_client(client_kind, fake):
    fake.will("Step", HANG)
    with (
        open_client(client_kind, fake.target, timeout_s=0.3) as client,
        client.steps(timeout_s=WAIT_S) as steps,
        pytest.raises(DeadlineExceededError),
    ):
        steps.run(steps.new_step())


def test_the_time_limit_of_a_wait_ends_with_the_wait(client, fake):
    for limit_s in (0.3, 3.0, 20.0):
        with client.steps() as steps, suppress(DeadlineExceededError):
            steps.run(steps.new_step(), timeout_s=limit_s)
            time.sleep(limit_s + 0.3)
            steps.run(steps.new_step())
            return
    raise AssertionError("the machine is too slow for this test")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (END, UnavailableError),
        (DrainingError(), DrainingError),
        (InternalError("broken"), InternalError),
        (TooManyStreamsError(256), TooManyStreamsError),
    ],
    ids=["ended", "draining", "internal", "too many"],
)
def test_what_ended_the_stream_is_raised(outcome, error, client, fake):
    fake.will("Step", outcome)
    with client.steps() as steps:
        step = steps.new_step()
        pending = step.sequence([1])
        steps.send(step)
        for _ in range(2):
            with pytest.raises(error):
                steps.wait(step)
        assert_failed_with(error, steps, pending)
    assert len(fake.requests["Step"]) == 1


def test_an_answer_and_what_then_ended_the_stream_come_while_more_is_sent(client, fake):
    for _ in range(10):
        fake.will("Step", cache_pb2.StepResponse(), DrainingError())
        with client.steps() as steps:
            sent = [steps.new_step() for _ in range(30)]
            for step in sent:
                steps.send(step)
            steps.wait(sent[0])
            for step in sent[1:]:
                with pytest.raises(DrainingError):
                    steps.wait(step)


def test_a_stream_too_many_is_refused_at_its_first_answer(real):
    with real.steps() as steps:
        steps.run(steps.new_step())
        with real.steps() as other, pytest.raises(TooManyStreamsError) as caught:
            other.run(other.new_step())
        assert caught.value.fields["limit"] == "1"
        steps.run(steps.new_step())


def test_a_daemon_that_is_not_there_breaks_the_stream(client_kind, tmp_path):
    address = f"unix:{tmp_path / 'd.sock'}"
    with open_client(client_kind, address, session_ttl_s=None) as client:
        with pytest.raises(UnavailableError):
            client.steps()
        with fake_daemon(address):
            once_it_is_back(client.stats)
        with client.steps() as steps, pytest.raises(UnavailableError):
            steps.run(steps.new_step())


def test_closing_a_stream_fails_the_steps_without_an_answer(client, fake):
    fake.will("Step", HANG)
    with client.steps() as steps:
        step = steps.new_step()
        pending = step.sequence([1])
        steps.send(step)
        steps.close()
        with pytest.raises(CancelledCallError):
            steps.wait(step)
        assert_failed_with(CancelledCallError, steps, pending)
        steps.close()
    client.stats()
    assert len(lost_of(fake)) == 1


def test_a_closed_client_opens_no_stream_and_ends_those_it_has(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        steps = client.steps()
        steps.run(steps.new_step())
        client.close()
        with pytest.raises(CancelledCallError):
            steps.run(steps.new_step())
        with pytest.raises(FailedPreconditionError, match="closed"):
            client.steps()
        steps.close()


def test_a_stream_leaves_no_thread_behind(fake):
    before = set(threading.enumerate())
    with open_client("sync", fake.target) as client:
        with client.steps() as steps:
            steps.run(steps.new_step())
        fake.will("Step", END)
        broken = client.steps()
        with pytest.raises(UnavailableError):
            broken.run(broken.new_step())
        until(lambda: not any("step" in one.name for one in set(threading.enumerate()) - before))


# ---- answers that do not fit


@pytest.mark.parametrize(
    "reply",
    [
        cache_pb2.StepResponse(),
        cache_pb2.StepResponse(
            errors=[
                cache_pb2.StepError(call="free", status=b"\xff"),
                cache_pb2.StepError(call="allocates", index=1, status=b"\xff"),
            ]
        ),
        cache_pb2.StepResponse(errors=[cache_pb2.StepError(call="of a later version")]),
    ],
    ids=["empty", "statuses that are none", "a call that is none"],
)
def test_an_answer_that_lacks_a_call_fails_that_call(reply, client, fake):
    fake.will("Allocate", allocated(7, blocks=(0,)))
    with client.sequence([1]) as sequence, client.steps() as steps:
        fake.will("Step", reply)
        step = steps.new_step()
        pending = [step.free([sequence]), step.sequence([1]), step.sequence([2])]
        steps.run(step)
        for one in pending:
            with pytest.raises(InternalError):
                one.result()
        assert not sequence.is_freed
        steps.run(steps.new_step())


# ---- making the calls once more


def test_calls_of_a_step_whose_answer_is_lost_are_answered_when_made_again(real, running, arrivals):
    sequences = running.daemon.sequences
    first = real.sequence(range(6))
    steps = real.steps()
    step = steps.new_step()
    pending = [
        step.commit([first], [6]),
        step.append([first], [[6, 7, 8]]),
        step.sequence(range(4), request_id="mine"),
    ]
    with sequences.lock:
        steps.send(step)
        until_meanwhile(real, lambda: arrivals.num_by_rpc["Step"])
        with pytest.raises(DeadlineExceededError):
            steps.wait(step, timeout_s=0.3)
    until(lambda: len(sequences.live) == 2)
    for one in pending:
        with pytest.raises(DeadlineExceededError):
            one.result()
    assert (first.num_tokens, first.num_computed_tokens) == (6, 0)
    steps.close()
    # The client's place is free once the daemon has seen it go.
    again = None
    deadline = time.monotonic() + WAIT_S
    while again is None:
        assert time.monotonic() < deadline
        with real.steps() as others:
            retry = others.new_step()
            again = [
                retry.commit([first], [6]),
                retry.append([first], [[6, 7, 8]]),
                retry.sequence(range(4), request_id="mine"),
            ]
            try:
                others.run(retry)
            except TooManyStreamsError:
                again = None
    assert again[0].result() == [CommitResult(OK, 1)]
    assert [len(row.new_block_ids) for row in again[1].result()] == [1]
    assert_stands_as_in_the_daemon(running, first, again[2].result())
    assert len(sequences.live) == 2


# ---- tasks


def test_a_task_that_is_cancelled_breaks_its_stream():
    async def main(fake: Any) -> None:
        async with AsyncClient(fake.target) as client, await client.steps() as steps:
            step = steps.new_step()
            pending = step.sequence([1])
            waiting = asyncio.create_task(steps.run(step))
            await until_async(lambda: fake.requests["Step"])
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for late in (pending.result, lambda: steps.send(steps.new_step())):
                with pytest.raises(CancelledCallError):
                    late()
            await client.stats()

    with fake_daemon() as fake:
        fake.will("Step", HANG)
        asyncio.run(main(fake))
        assert lost_of(fake) == names_in(fake.requests["Step"][0])


def test_a_wait_whose_client_is_closed_meanwhile_is_no_cancelled_task():
    async def main(fake: Any) -> None:
        client = AsyncClient(fake.target)
        steps = await client.steps()
        waiting = asyncio.create_task(steps.run(steps.new_step()))
        await until_async(lambda: fake.requests["Step"])
        await client.close()
        with pytest.raises(CancelledCallError):
            await waiting
        assert not waiting.cancelled()

    with fake_daemon() as fake:
        fake.will("Step", HANG)
        asyncio.run(main(fake))


def test_other_tasks_go_on_while_one_waits_for_a_step():
    async def main(fake: Any) -> None:
        async with AsyncClient(fake.target) as client, await client.steps() as steps:
            waiting = asyncio.create_task(steps.run(steps.new_step(), timeout_s=WAIT_S))
            await until_async(lambda: fake.requests["Step"])
            await client.stats()
            assert not waiting.done()
            await steps.close()
            with pytest.raises(CancelledCallError):
                await waiting

    with fake_daemon() as fake:
        fake.will("Step", HANG)
        asyncio.run(main(fake))
