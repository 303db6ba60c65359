"""Threads that answer calls: which of them takes one, what waits, and how they end."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from prefixcache.errors import TooManyCallsError, WaitedTooLongError
from prefixcache.server.workers import Workers, WorkQueueLimits
from tests.support.waiting import until

_TIMEOUT_S = 30.0


@pytest.fixture
def workers() -> Any:
    made = Workers(8, "test")
    yield made
    made.shutdown()


def all_busy(workers: Workers, count: int) -> tuple[list[Future[Any]], threading.Event]:
    """So many calls that run until the event is set."""
    started, go_on = threading.Barrier(count + 1), threading.Event()

    def run() -> int:
        started.wait(_TIMEOUT_S)
        assert go_on.wait(_TIMEOUT_S)
        return threading.get_ident()

    futures = [workers.submit(run) for _ in range(count)]
    started.wait(_TIMEOUT_S)
    return futures, go_on


def test_results_and_errors_come_back(workers: Workers) -> None:
    assert workers.submit(divmod, 7, 2).result(_TIMEOUT_S) == (3, 1)
    assert workers.submit(int, "11", base=2).result(_TIMEOUT_S) == 3
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 7, 0).result(_TIMEOUT_S)
    assert workers.submit(divmod, 7, 2).result(_TIMEOUT_S) == (3, 1)


def test_after_a_burst_calls_one_by_one_keep_to_few_threads(workers: Workers) -> None:
    """One that has answered is not idle at once, so it may be more than one."""
    futures, go_on = all_busy(workers, 8)
    go_on.set()
    assert len({future.result(_TIMEOUT_S) for future in futures}) == 8
    calls = [workers.submit(threading.get_ident).result(_TIMEOUT_S) for _ in range(200)]
    most = max(map(calls.count, set(calls)))
    assert most > 50  # in turn it would be 25 each


def test_what_finds_no_thread_waits_in_order(workers: Workers) -> None:
    futures, go_on = all_busy(workers, 8)
    order: list[int] = []
    late = [workers.submit(order.append, index) for index in range(20)]
    assert not any(future.done() for future in late)
    go_on.set()
    for future in (*futures, *late):
        future.result(_TIMEOUT_S)
    assert sorted(order) == list(range(20))
    assert len({future.result() for future in futures}) == 8


def test_work_knows_how_long_it_has_waited_for_its_thread() -> None:
    now_s = [100.0]
    workers = Workers(1, "test", clock=lambda: now_s[0])
    assert workers.submit(workers.queue_s).result(_TIMEOUT_S) == 0.0
    (busy,), go_on = all_busy(workers, 1)
    first = workers.submit(workers.queue_s)
    now_s[0] += 2.0
    second = workers.submit(workers.queue_s)
    now_s[0] += 0.5
    go_on.set()
    assert busy.result(_TIMEOUT_S)
    assert first.result(_TIMEOUT_S) == 2.5
    assert second.result(_TIMEOUT_S) == 0.5
    with workers.lent_place():
        assert workers.submit(workers.queue_s).result(_TIMEOUT_S) == 0.0
    workers.shutdown()


def test_one_thread_does_its_work_in_order() -> None:
    workers = Workers(1, "test")
    (busy,), go_on = all_busy(workers, 1)
    order: list[int] = []
    late = [workers.submit(order.append, index) for index in range(20)]
    go_on.set()
    for future in (busy, *late):
        future.result(_TIMEOUT_S)
    assert order == list(range(20))
    workers.shutdown()


def test_a_shutdown_lets_what_was_submitted_end_and_takes_no_more() -> None:
    workers = Workers(2, "ending")
    futures, go_on = all_busy(workers, 2)
    waiting = workers.submit(divmod, 7, 2)
    workers.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="ending"):
        workers.submit(divmod, 7, 2)
    go_on.set()
    workers.shutdown()
    assert waiting.result(0) == (3, 1)
    assert all(future.done() for future in futures)
    assert not [one for one in threading.enumerate() if one.name.startswith("ending")]


def test_a_shutdown_may_cancel_what_waits() -> None:
    workers = Workers(1, "test")
    (busy,), go_on = all_busy(workers, 1)
    waiting = workers.submit(divmod, 7, 2)
    workers.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        waiting.result(0)
    go_on.set()
    workers.shutdown()
    assert busy.done()


def test_a_lent_place_is_another_threads_until_it_is_given_back() -> None:
    workers = Workers(1, "lending")
    waiting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        with workers.lent_place():
            waiting.set()
            assert go_on.wait(_TIMEOUT_S)

    first = workers.submit(wait)
    assert waiting.wait(_TIMEOUT_S)
    assert workers.submit(divmod, 7, 2).result(_TIMEOUT_S) == (3, 1)
    lending = workers.submit(wait)
    assert workers.submit(divmod, 8, 2).result(_TIMEOUT_S) == (4, 0)
    assert not first.done()
    go_on.set()
    for future in (first, lending):
        future.result(_TIMEOUT_S)
    # What was started in their places has ended: one thread is left, which works in order.
    (busy,), done = all_busy(workers, 1)
    late = workers.submit(threading.get_ident)
    assert not late.done()
    done.set()
    assert late.result(_TIMEOUT_S) == busy.result(_TIMEOUT_S)
    until(lambda: threads_named("lending") == 1)
    workers.shutdown()


def test_a_place_is_lent_to_what_waits_already() -> None:
    workers = Workers(1, "lending")
    lend, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        assert lend.wait(_TIMEOUT_S)
        with workers.lent_place():
            assert go_on.wait(_TIMEOUT_S)

    first, second = workers.submit(wait), workers.submit(divmod, 7, 2)
    assert not second.done()
    lend.set()
    assert second.result(_TIMEOUT_S) == (3, 1)
    go_on.set()
    first.result(_TIMEOUT_S)
    workers.shutdown()


def test_it_is_idle_once_all_is_done_also_what_waits_in_a_lent_place() -> None:
    workers = Workers(2, "test")
    assert workers.wait_until_idle(0)
    go_on = threading.Event()

    def wait() -> None:
        with workers.lent_place():
            assert go_on.wait(_TIMEOUT_S)

    futures = [workers.submit(wait) for _ in range(3)]
    assert not workers.wait_until_idle(0)
    go_on.set()
    assert workers.wait_until_idle(_TIMEOUT_S)
    assert all(future.done() for future in futures)
    workers.shutdown()
    assert workers.wait_until_idle(0)


def test_others_stand_in_for_threads_that_peers_hold_up() -> None:
    workers = Workers(2, "holding")
    futures, go_on = all_busy(workers, 2)
    waiting = [workers.submit(threading.get_ident) for _ in range(5)]
    workers.stand_in_for(0)
    assert workers.num_waiting == 5
    workers.stand_in_for(1)
    for future in waiting:
        assert future.result(_TIMEOUT_S)
    workers.stand_in_for(0)
    go_on.set()
    for future in futures:
        future.result(_TIMEOUT_S)
    # Those that are too many end as they find nothing to do.
    for _ in range(4):
        workers.submit(divmod, 7, 2).result(_TIMEOUT_S)
    until(lambda: threads_named("holding") == 2)
    workers.shutdown()


def test_work_waits_for_the_threads_there_are_where_no_more_can_be_started(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    futures, go_on = all_busy(workers, 2)
    monkeypatch.setattr(threading.Thread, "start", fail)
    late = [workers.submit(divmod, 7, 2) for _ in range(3)]
    workers.stand_in_for(5)
    assert workers.num_waiting == 3
    go_on.set()
    for future in (*futures, *late):
        assert future.result(_TIMEOUT_S)


def threads_named(name: str) -> int:
    return sum(one.name.startswith(name) for one in threading.enumerate())


def test_work_that_was_cancelled_while_it_waited_is_not_done(workers: Workers) -> None:
    futures, go_on = all_busy(workers, 8)
    done: list[int] = []
    waiting = workers.submit(done.append, 1)
    assert waiting.cancel()
    last = workers.submit(done.append, 2)
    go_on.set()
    for future in (*futures, last):
        future.result(_TIMEOUT_S)
    assert done == [2]


def reason(workers: Workers) -> type[Exception] | None:
    refusal = workers.refusal()
    return type(refusal) if refusal is not None else None


def test_what_finds_the_queue_full_is_to_be_refused_at_once() -> None:
    workers = Workers(1, "test", WorkQueueLimits(max_waiting=2))
    (busy,), go_on = all_busy(workers, 1)
    waiting = [workers.submit(reason, workers) for _ in range(2)]
    for _ in range(5):
        assert workers.submit(reason, workers).result(_TIMEOUT_S) is TooManyCallsError
    assert workers.num_waiting == 2
    go_on.set()
    assert [future.result(_TIMEOUT_S) for future in waiting] == [None, None]
    assert busy.result(_TIMEOUT_S)
    assert workers.submit(reason, workers).result(_TIMEOUT_S) is None
    workers.shutdown()


def test_what_has_waited_too_long_is_to_be_refused_and_later_work_is_not() -> None:
    now_s = [0.0]
    limits = WorkQueueLimits(max_wait_s=10.0)
    workers = Workers(1, "test", limits, clock=lambda: now_s[0])
    (busy,), go_on = all_busy(workers, 1)
    early = workers.submit(reason, workers)
    now_s[0] = 1.0
    late = workers.submit(reason, workers)
    now_s[0] = 9.9
    workers.refuse_late()
    assert workers.num_waiting == 2
    now_s[0] = 10.0
    workers.refuse_late()
    assert early.result(_TIMEOUT_S) is WaitedTooLongError
    assert workers.num_waiting == 1
    go_on.set()
    assert late.result(_TIMEOUT_S) is None
    assert busy.result(_TIMEOUT_S)
    workers.shutdown()
