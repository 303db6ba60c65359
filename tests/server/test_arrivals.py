"""Peers that begin a call and fall silent keep no thread for long. The clock is the test's."""

from __future__ import annotations

import threading

import grpc
import pytest

from prefixcache.rpc._pb import admin_pb2
from prefixcache.server.arrivals import MAX_LATE, PATIENCE_S, REQUEST_TIMEOUT_S
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import running_daemon
from tests.support.raw_peer import RawPeer
from tests.support.stubs import METHODS, call_without_request, connected
from tests.support.waiting import until

NUM_WORKERS = 2


@pytest.mark.parametrize("name", METHODS)
def test_calls_without_a_request_leave_the_threads_to_others(name: str) -> None:
    now_s, over = [0.0], threading.Event()
    with (
        running_daemon(
            CacheOptions(16, 4), max_workers=NUM_WORKERS, clock=lambda: now_s[0]
        ) as running,
        connected(running.target) as stubs,
        connected(running.target) as others,
    ):
        calls = [call_without_request(stubs, name, over) for _ in range(NUM_WORKERS)]
        waiting = running.server._arrivals
        until(lambda: len(waiting) == NUM_WORKERS)
        now_s[0] = REQUEST_TIMEOUT_S - 0.1
        running.sweep()
        assert len(waiting) == NUM_WORKERS
        # Not before: its own request may be under way when the others are cut.
        answered = others.start("GetStats", admin_pb2.GetStatsRequest())
        now_s[0] = REQUEST_TIMEOUT_S
        running.sweep()
        for call in calls:
            assert call.exception(timeout=20).code() is grpc.StatusCode.CANCELLED
        assert others.finish(answered).num_blocks == 16
        until(lambda: len(waiting) == 0)
        over.set()


def test_health_checks_without_a_request_leave_the_threads_to_others() -> None:
    now_s = [0.0]
    with (
        running_daemon(
            CacheOptions(16, 4), max_workers=NUM_WORKERS, clock=lambda: now_s[0]
        ) as running,
        RawPeer(running.target) as silent,
        connected(running.target) as others,
    ):
        waiting = running.server._arrivals
        silent.begin("/grpc.health.v1.Health/Watch")
        until(lambda: len(waiting) == 1)
        assert others.stats().num_blocks == 16
        for _ in range(NUM_WORKERS):
            silent.begin("/grpc.health.v1.Health/Check")
        until(lambda: len(waiting) == 1 + NUM_WORKERS)
        answered = others.start("GetStats", admin_pb2.GetStatsRequest())
        until(lambda: running.server._workers.num_waiting == 1)
        now_s[0] = REQUEST_TIMEOUT_S
        running.sweep()
        until(lambda: len(waiting) == 0)
        assert others.finish(answered).num_blocks == 16


def test_others_stand_in_for_threads_that_silent_peers_hold_up() -> None:
    """Health checks need no credentials, so anybody may send the headers of many."""
    now_s, num_silent = [0.0], 20 * NUM_WORKERS
    with (
        running_daemon(
            CacheOptions(16, 4), max_workers=NUM_WORKERS, clock=lambda: now_s[0]
        ) as running,
        RawPeer(running.target) as silent,
        connected(running.target) as others,
    ):
        waiting, workers = running.server._arrivals, running.server._workers
        for _ in range(num_silent):
            silent.begin("/grpc.health.v1.Health/Check")
        until(lambda: len(waiting) + workers.num_waiting == num_silent)
        answered = others.start("GetStats", admin_pb2.GetStatsRequest())
        until(lambda: workers.num_waiting == num_silent - NUM_WORKERS + 1)
        # Twice as many as are held up come each time, until there are enough.
        num_threads = NUM_WORKERS
        while num_threads <= num_silent:
            assert len(waiting) == num_threads
            now_s[0] += PATIENCE_S
            running.sweep()
            num_threads = NUM_WORKERS + 2 * num_threads
            until(lambda: len(waiting) == min(num_threads, num_silent))  # noqa: B023 - at once
        assert others.finish(answered).num_blocks == 16
        assert len(waiting) == num_silent
        assert now_s[0] < REQUEST_TIMEOUT_S


def test_of_too_many_silent_calls_the_oldest_are_cut_at_once() -> None:
    now_s = [0.0]
    with (
        running_daemon(
            CacheOptions(16, 4), max_workers=MAX_LATE + 2, clock=lambda: now_s[0]
        ) as running,
        connected(running.target) as stubs,
        RawPeer(running.target) as silent,
    ):
        waiting, over = running.server._arrivals, threading.Event()
        oldest = call_without_request(stubs, "Lookup", over)
        until(lambda: len(waiting) == 1)
        for _ in range(MAX_LATE):
            silent.begin("/grpc.health.v1.Health/Check")
        until(lambda: len(waiting) == MAX_LATE + 1)
        running.sweep()
        assert len(waiting) == MAX_LATE + 1
        now_s[0] = PATIENCE_S
        running.sweep()
        assert oldest.exception(timeout=20).code() is grpc.StatusCode.CANCELLED
        until(lambda: len(waiting) == MAX_LATE)
        over.set()


def test_a_call_that_is_ended_without_a_request_is_refused() -> None:
    over = threading.Event()
    over.set()
    with running_daemon(CacheOptions(16, 4)) as running, connected(running.target) as stubs:
        error = call_without_request(stubs, "Lookup", over).exception(timeout=20)
        assert (error.code(), error.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request: is missing",
        )
