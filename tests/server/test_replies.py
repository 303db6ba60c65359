"""Callers that do not read their replies hold neither threads nor, for long, memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import MAX_STREAMS_PER_CONNECTION, CacheOptions, LimitOptions
from prefixcache.server.replies import LARGE_REPLY_BYTES, UNREAD_TIMEOUT_S, Replies
from prefixcache.server.stuck_connections import PATIENCE_S, StuckConnections
from tests.support.daemon import running_daemon
from tests.support.raw_peer import MAX_CONCURRENT_STREAMS, RawPeer
from tests.support.stubs import METHODS, connected
from tests.support.waiting import until

NUM_CALLS = 40
LARGE = cache_pb2.LookupRequest(token_ids=range(1000), want_hashes=True).SerializeToString()
"""Its reply has 32,000 bytes in blocks of one token."""


def test_replies_that_nobody_reads_hold_no_thread_and_are_given_up() -> None:
    now_s = [0.0]
    with (
        running_daemon(CacheOptions(16, 1), max_workers=2, clock=lambda: now_s[0]) as running,
        connected(running.target) as others,
        RawPeer(running.target) as silent,
    ):
        for _ in range(NUM_CALLS):
            silent.call(METHODS["Lookup"].path, LARGE)
        unread = running.server._replies
        until(lambda: len(unread) == NUM_CALLS)
        assert others.lookup([1, 2]).num_cached_tokens == 0
        now_s[0] = UNREAD_TIMEOUT_S - 0.1
        running.sweep()
        assert others.lookup([1, 2]).num_cached_tokens == 0
        assert len(unread) == NUM_CALLS
        now_s[0] = UNREAD_TIMEOUT_S
        running.sweep()
        until(lambda: len(unread) == 0)
        assert others.lookup([1, 2]).num_cached_tokens == 0


def test_replies_that_nobody_reads_go_with_their_connection() -> None:
    with running_daemon(CacheOptions(16, 1), max_workers=2) as running:
        unread = running.server._replies
        with RawPeer(running.target) as silent:
            for _ in range(NUM_CALLS):
                silent.call(METHODS["Lookup"].path, LARGE)
            until(lambda: len(unread) == NUM_CALLS)
        until(lambda: len(unread) == 0)


def test_a_peer_that_fills_the_memory_and_reads_nothing_loses_its_connection() -> None:
    """Cut calls do not end on such a connection. Another peer, which reads, keeps its own."""
    now_s = [0.0]
    request = cache_pb2.LookupRequest(token_ids=range(100_000), want_hashes=True)
    limits = LimitOptions(max_message_bytes=4 * 2**20)
    with (
        running_daemon(
            CacheOptions(16, 1), None, limits, max_workers=2, clock=lambda: now_s[0]
        ) as running,
        connected(running.target) as others,
        RawPeer(running.target) as silent,
    ):
        unread = running.server._replies
        for _ in range(15):  # 51 MB, and 64 MiB may wait
            silent.call(METHODS["Lookup"].path, request.SerializeToString())
        until(lambda: len(unread) == 15)
        silent.open_window(2**30)
        # On the way to the socket, where no cut ends them.
        for _ in range(15):
            silent.call(METHODS["Lookup"].path, request.SerializeToString())
        until(lambda: unread.are_too_many)
        running.sweep()
        now_s[0] = PATIENCE_S - 0.1
        running.sweep()
        assert len(others.call("Lookup", request).block_hashes) == 100_000
        assert unread.are_too_many
        now_s[0] = PATIENCE_S
        running.sweep()
        until(lambda: len(unread) == 0)
        assert len(others.call("Lookup", request).block_hashes) == 100_000


def test_without_a_descriptor_left_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the thread that ends sessions, which has to go on."""

    def no_descriptor(path: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "listdir", no_descriptor)
    StuckConnections(lambda: 0.0).cut()


def test_replies_that_are_read_count_no_more() -> None:
    with running_daemon(CacheOptions(16, 1)) as running, connected(running.target) as stubs:
        for _ in range(20):
            reply = stubs.call("Lookup", LARGE)
            assert len(reply.block_hashes) == 1000
        until(lambda: len(running.server._replies) == 0)


def test_a_connection_may_have_as_many_streams_as_the_daemon_says() -> None:
    with (
        running_daemon(CacheOptions(16, 1)) as running,
        connected(running.target) as stubs,
        RawPeer(running.target) as peer,
    ):
        limit = stubs.info().limits.max_streams_per_connection
        assert peer.settings()[MAX_CONCURRENT_STREAMS] == limit == MAX_STREAMS_PER_CONNECTION


class Call:
    """A call's context, as far as `Replies` asks it."""

    def __init__(self, has_ended: bool = False) -> None:
        self.is_cancelled = False
        self._has_ended = has_ended
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return not self._has_ended

    def cancel(self) -> None:
        self.is_cancelled = True

    def end(self) -> None:
        for callback in self._callbacks:
            callback()


def leave(replies: Replies, num_bytes: int, **state: bool) -> Any:
    call = Call(**state)
    replies.leaves(cast(grpc.ServicerContext, call), num_bytes)
    return call


@pytest.fixture
def replies() -> Replies:
    return Replies(10 * LARGE_REPLY_BYTES, lambda: 0.0)


def test_the_oldest_are_given_up_when_too_many_bytes_wait(replies: Replies) -> None:
    calls = [leave(replies, 4 * LARGE_REPLY_BYTES) for _ in range(2)]
    assert not any(call.is_cancelled for call in calls)
    calls.append(leave(replies, 2 * LARGE_REPLY_BYTES))
    assert not any(call.is_cancelled for call in calls)  # exactly full
    calls.append(leave(replies, LARGE_REPLY_BYTES))
    assert [call.is_cancelled for call in calls] == [True, False, False, False]
    for call in calls:
        call.end()
    assert len(replies) == 0
    assert not leave(replies, 10 * LARGE_REPLY_BYTES).is_cancelled


def test_one_reply_alone_may_be_larger_than_all_may_be_together(replies: Replies) -> None:
    before = leave(replies, LARGE_REPLY_BYTES)
    large = leave(replies, 11 * LARGE_REPLY_BYTES)
    assert (before.is_cancelled, large.is_cancelled) == (True, False)
    leave(replies, LARGE_REPLY_BYTES)
    assert large.is_cancelled


def test_small_replies_and_those_of_ended_calls_do_not_count(replies: Replies) -> None:
    leave(replies, LARGE_REPLY_BYTES - 1)
    leave(replies, LARGE_REPLY_BYTES, has_ended=True)
    assert len(replies) == 0
