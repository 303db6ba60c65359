"""`watch_events` of both clients, against a real daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixcache import (
    AsyncClient,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventPosition,
    EventsLost,
    ExtraKeys,
    Lora,
    SnapshotEnded,
    SnapshotStarted,
    errors,
)
from prefixcache.rpc._pb import admin_pb2
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.event_streams import MAX_EVENT_STREAMS
from tests.client.fake_daemon import BOOT_ID, FakeDaemon
from tests.client.twins import next_event, open_client
from tests.support.daemon import RunningDaemon, running_daemon


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(16, 4, event_buffer_bytes=2**20)) as daemon:
        yield daemon


@pytest.fixture
def watcher(client_kind: str, running: RunningDaemon) -> Iterator[Any]:
    with open_client(client_kind, running.target) as opened:
        yield opened


def fill(client: Any, tokens: list[int], extra_keys: ExtraKeys | None = None) -> None:
    with client.sequence(tokens, extra_keys=extra_keys) as sequence:
        sequence.commit(len(tokens) - sequence.num_cached_tokens)


def test_a_snapshot_then_changes(watcher: Any) -> None:
    fill(watcher, list(range(8)))
    stream = watcher.watch_events()
    assert stream.position() is None
    assert next_event(stream) == SnapshotStarted(2)
    assert stream.position() is None
    stored = next_event(stream)
    assert (stored.number, stored.parent_hash, len(stored.block_hashes)) == (None, None, 2)
    assert (len(stored.token_ids), stored.extra_keys, stored.block_size) == (0, (), 4)
    assert next_event(stream) == SnapshotEnded(1)
    assert stream.position().number == 1

    fill(watcher, list(range(12)))
    stored = next_event(stream)
    assert isinstance(stored, BlocksStored)
    assert (stored.number, len(stored.block_hashes)) == (1, 1)
    np.testing.assert_array_equal(stored.token_ids, [8, 9, 10, 11])
    assert stored.time_s > 0
    fill(watcher, list(range(100, 160)))
    removed, stored = next_event(stream), next_event(stream)
    assert isinstance(removed, BlocksRemoved)
    assert (removed.number, len(removed.block_hashes)) == (2, 2)
    assert (stored.number, len(stored.block_hashes)) == (3, 15)
    watcher.reset_cache()
    assert isinstance(next_event(stream), CacheCleared)
    assert stream.position() == EventPosition(5, watcher.server_info().boot_id)
    stream.close()
    with pytest.raises(errors.CancelledCallError):
        next_event(stream)


def test_extra_keys_come_as_the_hashes_have_them(watcher: Any) -> None:
    stream = watcher.watch_events(snapshot=False)
    fill(watcher, list(range(8)), ExtraKeys(lora=Lora("poet", "/v1"), cache_salt="s"))
    stored = next_event(stream)
    lora = ("lora", "poet", "/v1")
    assert stored.extra_keys == ((lora, ("cache_salt", "s")), (lora,))
    stream.close()


def test_it_goes_on_at_a_position(watcher: Any) -> None:
    stream = watcher.watch_events()
    assert [next_event(stream), next_event(stream)] == [SnapshotStarted(0), SnapshotEnded(0)]
    position = stream.position()
    stream.close()
    fill(watcher, list(range(4)))
    with watcher.watch_events(position) as stream:
        assert next_event(stream).number == 0
    other = EventPosition(0, b"another start of it")
    for gone in (other, EventPosition(2)):
        with watcher.watch_events(gone) as stream, pytest.raises(errors.EventsGoneError) as caught:
            next_event(stream)
        assert caught.value.fields["next_number"] == "1"


def test_a_position_below_zero_is_refused_before_anything_is_sent(watcher: Any) -> None:
    for number in (-1, 2**64):
        with pytest.raises(errors.InvalidArgumentError, match="from_number"):
            watcher.watch_events(EventPosition(number))


def test_the_end_of_the_daemon_ends_the_stream(watcher: Any, running: RunningDaemon) -> None:
    stream = watcher.watch_events()
    next_event(stream)
    running.server.stop(5.0)
    assert next_event(stream) == SnapshotEnded(0)
    with pytest.raises(errors.DrainingError):
        next_event(stream)


def test_a_task_that_is_held_up_hears_that_a_stream_is_too_many(running: RunningDaemon) -> None:
    async def main() -> None:
        async with AsyncClient(running.target) as client:
            streams = [await client.watch_events() for _ in range(MAX_EVENT_STREAMS)]
            for stream in streams:
                await anext(stream)
            for num_turns in range(8):
                refused = await client.watch_events()
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                time.sleep(0.05)  # The daemon refuses the stream, be its request sent or not.
                with pytest.raises(errors.TooManyStreamsError):
                    await anext(refused)

    asyncio.run(main())


def test_a_loss_is_an_event_and_moves_the_position(fake: FakeDaemon, client: Any) -> None:
    lost = admin_pb2.CacheEvent(number=3, lost=admin_pb2.EventsLost(end_number=9))
    reply = admin_pb2.WatchEventsResponse(boot_id=BOOT_ID, next_number=9, events=[lost])
    fake.will("WatchEvents", reply)
    stream = client.watch_events(EventPosition(3), snapshot=False)
    assert next_event(stream) == EventsLost(3, 9)
    assert stream.position() == EventPosition(9, BOOT_ID)
    with pytest.raises(errors.UnavailableError, match="ended the stream"):
        next_event(stream)
    (request,) = fake.requests["WatchEvents"]
    assert (request.from_number, request.without_snapshot) == (3, True)
