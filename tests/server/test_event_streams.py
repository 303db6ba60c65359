"""WatchEvents over a real socket: snapshot, changes, resume, loss, limits, the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from prefixcache.core.events import MIN_BUFFER_BYTES, Reader
from prefixcache.core.sequence import CommitRow
from prefixcache.rpc._pb import admin_pb2
from prefixcache.rpc._pb.admin_pb2 import WatchEventsRequest, WatchEventsResponse
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.event_streams import MAX_EVENT_STREAMS
from prefixcache.types import NO_EXTRA_KEYS
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.mirror import Mirror, index_of
from tests.support.scrape import scrape
from tests.support.stubs import Refused, StreamCall, Stubs, connected
from tests.support.waiting import until

OWNER = b"a client"


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    cache = CacheOptions(64, 4, hash_seed="a seed", event_buffer_bytes=MIN_BUFFER_BYTES)
    with running_daemon(cache) as daemon:
        yield daemon


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as found:
        yield found


@contextmanager
def watching(stubs: Stubs, **fields: Any) -> Iterator[StreamCall]:
    with stubs.stream("WatchEvents") as stream:
        stream.send(WatchEventsRequest(**fields))
        yield stream
        stream.replies.cancel()


def fill(running: RunningDaemon, first: int, num_tokens: int) -> None:
    """Cache the blocks of a prompt, and let it go."""
    sequences = running.daemon.sequences
    prompt = sequences.prepare(np.arange(first, first + num_tokens, dtype=np.uint32), NO_EXTRA_KEYS)
    with sequences.lock:
        held = sequences.allocate(OWNER, "", prompt)
        start = held.num_cached_tokens
        sequences.rows.commit(OWNER, [CommitRow(held.sequence_id, start, num_tokens - start)])
        sequences.free(OWNER, [held.sequence_id])


class Follower:
    """A mirror fed by a stream. `lost` are the numbers that it was told are gone."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.next_number: int | None = None
        self.lost: list[range] = []
        self.kinds: list[str] = []

    def read(self, stream: StreamCall) -> WatchEventsResponse:
        response = stream.receive()
        for event in response.events:
            kind = event.WhichOneof("event")
            self.kinds.append(kind)
            getattr(self, f"_{kind}")(event)
        return response

    def read_until(self, stream: StreamCall, number: int) -> None:
        while self.next_number != number:
            self.read(stream)

    def _snapshot_started(self, event: admin_pb2.CacheEvent) -> None:
        self.mirror.clear()
        self.next_number = None
        self._left = event.snapshot_started.num_blocks

    def _snapshot_ended(self, event: admin_pb2.CacheEvent) -> None:
        assert self._left == 0
        self.next_number = event.number

    def _stored(self, event: admin_pb2.CacheEvent) -> None:
        stored = event.stored
        self.mirror.store(stored.block_hashes, stored.parent_hash or None)
        if self.next_number is None:
            self._left -= len(stored.block_hashes)
        else:
            self._advance(event)
            assert len(stored.token_ids) == len(stored.block_hashes) * stored.block_size

    def _removed(self, event: admin_pb2.CacheEvent) -> None:
        self._advance(event)
        self.mirror.remove(event.removed.block_hashes)

    def _cleared(self, event: admin_pb2.CacheEvent) -> None:
        self._advance(event)
        self.mirror.clear()

    def _lost(self, event: admin_pb2.CacheEvent) -> None:
        assert event.number == self.next_number
        self.lost.append(range(event.number, event.lost.end_number))
        self.next_number = event.lost.end_number

    def _advance(self, event: admin_pb2.CacheEvent) -> None:
        assert event.number == self.next_number
        assert event.time_s > 0
        self.next_number = event.number + 1


def test_a_snapshot_and_then_changes_make_a_mirror_of_the_index(
    running: RunningDaemon, stubs: Stubs
) -> None:
    pool = running.daemon.sequences.pool
    for first in (0, 1000, 2000, 0):
        fill(running, first, 50)
    follower = Follower()
    with watching(stubs) as stream:
        until_end = pool.events.next_number
        follower.read_until(stream, until_end)
        assert follower.kinds[0] == "snapshot_started"
        assert follower.mirror.parent_of.keys() == index_of(pool)
        for first in (3000, 0, 4000, 1000, 5000):
            fill(running, first, 77)
        stubs.reset()
        fill(running, 0, 9)
        follower.read_until(stream, pool.events.next_number)
    assert {"stored", "removed", "cleared"} <= set(follower.kinds)
    assert follower.mirror.parent_of.keys() == index_of(pool)
    assert len(follower.mirror.parent_of) == 2
    assert not follower.lost


def test_the_snapshot_of_an_empty_cache_is_empty_and_whole(stubs: Stubs) -> None:
    with watching(stubs) as stream:
        response = stream.receive()
    assert [event.WhichOneof("event") for event in response.events] == [
        "snapshot_started",
        "snapshot_ended",
    ]
    assert (response.next_number, response.boot_id) == (0, stubs.info().boot_id)


def test_a_stream_goes_on_where_another_one_was(running: RunningDaemon, stubs: Stubs) -> None:
    pool = running.daemon.sequences.pool
    follower = Follower()
    with watching(stubs) as stream:
        position = follower.read(stream)
    fill(running, 0, 100)
    fill(running, 1000, 250)
    with watching(stubs, from_number=position.next_number, boot_id=position.boot_id) as stream:
        follower.read_until(stream, pool.events.next_number)
    assert follower.kinds.count("snapshot_started") == 1
    assert follower.mirror.parent_of.keys() == index_of(pool)


def test_without_a_snapshot_only_what_happens_from_now_on_is_told(
    running: RunningDaemon, stubs: Stubs
) -> None:
    fill(running, 0, 20)
    with watching(stubs, without_snapshot=True) as stream:
        response = stream.receive()
        assert (len(response.events), response.next_number) == (0, 1)
        fill(running, 1000, 8)
        (event,) = stream.receive().events
    assert event.number == 1
    assert list(event.stored.token_ids) == list(range(1000, 1008))
    assert event.stored.parent_hash == b""
    assert len(event.stored.block_hashes) == 2


@pytest.mark.parametrize("fields", [{"from_number": 1}, {"from_number": 0, "boot_id": b"other"}])
def test_a_number_that_is_not_there_is_out_of_range(stubs: Stubs, fields: dict[str, Any]) -> None:
    with watching(stubs, **fields) as stream:
        refusal = stream.ended()
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.OUT_OF_RANGE, "EVENTS_GONE")
    assert refusal.numbers["next_number"] == "0"


def overflow(running: RunningDaemon, beyond: int) -> None:
    """Let the buffer go round until it has not even the events up to that number."""
    log, first = running.daemon.sequences.pool.events, 0
    while log.first_number <= beyond:
        first += 1000
        fill(running, first, 250)
    assert log.num_bytes <= MIN_BUFFER_BYTES


def test_a_number_that_the_buffer_has_no_more_is_out_of_range(
    running: RunningDaemon, stubs: Stubs
) -> None:
    overflow(running, 2)
    with watching(stubs, from_number=2) as stream:
        refusal = stream.ended()
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.OUT_OF_RANGE, "EVENTS_GONE")
    log = running.daemon.sequences.pool.events
    assert refusal.numbers["first_number"] == str(log.first_number)


@pytest.mark.parametrize("without_snapshot", [False, True])
def test_a_slow_reader_is_told_what_it_lost_and_holds_nobody_up(
    running: RunningDaemon, stubs: Stubs, without_snapshot: bool
) -> None:
    pool, follower = running.daemon.sequences.pool, Follower()
    with watching(stubs, without_snapshot=without_snapshot) as stream:
        if without_snapshot:
            follower.next_number = stream.receive().next_number
        else:
            follower.read_until(stream, 0)
        # Nothing is read: gRPC's own buffers are full at some time, and the daemon's goes round.
        for _ in range(20):
            overflow(running, pool.events.next_number)
        if without_snapshot:
            follower.mirror = Forgetful()
        follower.read_until(stream, pool.events.next_number)
    assert follower.lost
    assert all(len(gap) > 0 for gap in follower.lost)
    gaps = {
        reader: scrape(running)["prefixcache_event_gaps_total", {"reader": reader}]
        for reader in Reader
    }
    assert gaps == {Reader.WATCH: len(follower.lost), Reader.ZMQ: 0}
    assert scrape(running)["prefixcache_events_total"] == pool.events.next_number
    snapshots = follower.kinds.count("snapshot_started")
    if without_snapshot:
        assert snapshots == 0
    else:
        assert snapshots == 1 + len(follower.lost)
        assert follower.mirror.parent_of.keys() == index_of(pool)


class Forgetful(Mirror):
    """Of a reader that takes a gap as it is."""

    def store(self, block_hashes: Any, parent: bytes | None) -> None: ...

    def remove(self, block_hashes: Any) -> None: ...


def test_one_watcher_too_many_is_refused_until_another_goes(
    running: RunningDaemon, stubs: Stubs
) -> None:
    with ExitStack() as opened:
        streams = [opened.enter_context(watching(stubs)) for _ in range(MAX_EVENT_STREAMS)]
        for stream in streams:
            stream.receive()
        with watching(stubs) as stream:
            refusal = stream.ended()
        assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_STREAMS", "16")
        streams[0].replies.cancel()
        until(lambda: can_watch(stubs))


def can_watch(stubs: Stubs) -> bool:
    with watching(stubs) as stream:
        try:
            stream.receive()
        except Refused:
            return False
        return True


def test_watchers_that_have_gone_are_forgotten(running: RunningDaemon, stubs: Stubs) -> None:
    log = running.daemon.sequences.pool.events
    for _ in range(3):
        with watching(stubs) as stream:
            stream.receive()
            until(lambda: log._waiting)
        until(lambda: not log._waiting)


def test_a_daemon_without_a_buffer_keeps_no_events() -> None:
    with running_daemon(CacheOptions(16, 4)) as running, connected(running.target) as stubs:
        assert running.daemon.sequences.pool.events is None
        assert "events" not in stubs.info().capabilities
        with watching(stubs) as stream:
            refusal = stream.ended()
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EVENTS_OFF")


def test_the_drain_ends_the_streams_at_once(running: RunningDaemon, stubs: Stubs) -> None:
    with watching(stubs) as stream:
        stream.receive()
        assert running.server.stop(drain_timeout_s=30.0)
        refusal = stream.ended()
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
