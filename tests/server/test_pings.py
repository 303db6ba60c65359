"""Clients that ping to see whether the daemon is there: how often they may, and what ends them."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from prefixcache.client.channel import channel_options
from prefixcache.server import rpc_server
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.raw_peer import RawPeer

NUM_PINGS = 20
INTERVAL_MS = 20
LOOKUP = "/prefixcache.v1.PrefixCacheService/Lookup"


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    """A daemon for which an interval of 20 ms is what 5 s are to others."""
    monkeypatch.setattr(rpc_server, "MIN_PING_INTERVAL_MS", INTERVAL_MS)
    with running_daemon(CacheOptions(4, 4)) as running:
        yield running


def wait_for_twice_the_interval() -> None:
    """As clients do that ping every 10 s."""
    select.select([], [], [], 2 * INTERVAL_MS / 1000)


@pytest.mark.parametrize("has_call", [False, True], ids=["idle", "in a call"])
def test_pings_at_twice_the_least_interval_are_answered_for_ever(
    running: RunningDaemon, has_call: bool
) -> None:
    with RawPeer(running.target) as peer:
        if has_call:
            peer.begin(LOOKUP)  # its request never comes
        for _ in range(NUM_PINGS):
            peer.ping()
            wait_for_twice_the_interval()
        peer.ping()


def test_a_client_that_floods_the_daemon_with_pings_is_sent_away() -> None:
    with running_daemon(CacheOptions(4, 4)) as running, RawPeer(running.target) as peer:
        peer.send_pings(NUM_PINGS)
        assert peer.goodbye() == "too_many_pings"
        with RawPeer(running.target) as another:
            another.ping()


def test_clients_that_ping_every_10_s_have_room_and_ours_ping_less_often() -> None:
    assert rpc_server.MIN_PING_INTERVAL_MS <= 10_000 / 2
    options = dict(channel_options())
    assert int(options["grpc.keepalive_time_ms"]) >= 2 * rpc_server.MIN_PING_INTERVAL_MS
