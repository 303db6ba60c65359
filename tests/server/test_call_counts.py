"""Which calls count, under which code: on a real server, through all of its handlers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixcache.rpc import wire
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.daemon import CacheOptions, LimitOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import Peer, Refused, Stubs, connected


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(8, 4), limits=LimitOptions(max_step_streams=1)) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs


def counted(running: RunningDaemon) -> dict[str, dict[str, int]]:
    """By RPC and code, of what was called; each call has a duration."""
    found = {}
    for name, counts in running.server.call_counts.items():
        totals = counts.read()
        assert totals.durations.count == sum(totals.by_code.values())
        if totals.durations.count:
            found[name] = {code: count for code, count in totals.by_code.items() if count}
    return found


def test_every_rpc_is_counted_from_0(running: RunningDaemon) -> None:
    assert running.server.call_counts.keys() == {method.name for method in wire.methods()}
    assert counted(running) == {}
    assert CallCounts().read().by_code == {"OK": 0, "INTERNAL": 0}


def test_calls_count_by_how_they_ended(running: RunningDaemon, stubs: Stubs) -> None:
    peer = Peer(stubs)
    peer.allocate(range(4))
    peer.allocate(range(4))
    for tokens, code in ((range(400), "INVALID_ARGUMENT"), (range(100, 132), "RESOURCE_EXHAUSTED")):
        with pytest.raises(Refused) as caught:
            peer.allocate(tokens)
        assert caught.value.code.name == code
    stubs.refused("Lookup", b"\xff")
    assert counted(running) == {
        "Allocate": {"OK": 2, "INVALID_ARGUMENT": 1, "RESOURCE_EXHAUSTED": 1},
        "Lookup": {"INVALID_ARGUMENT": 1},
    }


def test_durations_are_of_the_daemons_work(running: RunningDaemon, stubs: Stubs) -> None:
    for _ in range(10):
        stubs.lookup(range(4))
    durations = running.server.call_counts["Lookup"].read().durations
    assert durations.count == 10
    assert 0 < durations.sum < 10


def test_a_bug_counts_as_internal(
    running: RunningDaemon, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.daemon.sequences, "stats", lambda: 1 / 0)
    stubs.refused("GetStats", b"")
    assert counted(running) == {"GetStats": {"INTERNAL": 1}}


def test_each_message_of_a_stream_counts_and_what_ends_it(
    running: RunningDaemon, stubs: Stubs
) -> None:
    free = cache_pb2.FreeRequest(owner=bytes(16), sequence_ids=[1])
    with stubs.steps() as steps:
        for _ in range(3):
            steps.run(cache_pb2.StepRequest(free=free))
        assert counted(running) == {"Step": {"OK": 3}}
        with stubs.steps() as one_more:
            one_more.send(cache_pb2.StepRequest())
            assert one_more.ended().code.name == "RESOURCE_EXHAUSTED"
        assert counted(running) == {"Step": {"OK": 3, "RESOURCE_EXHAUSTED": 1}}
        steps.send(b"\xff")
        assert steps.ended().code.name == "INVALID_ARGUMENT"
    assert counted(running) == {"Step": {"OK": 3, "RESOURCE_EXHAUSTED": 1, "INVALID_ARGUMENT": 1}}


def test_a_call_without_a_request_counts(running: RunningDaemon, stubs: Stubs) -> None:
    call = stubs.channel.stream_unary("/prefixcache.v1.AdminService/GetStats")
    future = call.future(iter(()))
    assert future.code().name == "INVALID_ARGUMENT"
    assert counted(running) == {"GetStats": {"INVALID_ARGUMENT": 1}}
