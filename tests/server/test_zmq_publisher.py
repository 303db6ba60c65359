"""Events over ZeroMQ in vLLM's format: read by plain structs, and by vLLM's own where it is."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from prefixcache.core.events import MIN_BUFFER_BYTES, Reader
from prefixcache.core.sequence import CommitRow
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.server.vllm_events import VllmEncoder
from prefixcache.server.zmq_publisher import ZmqPublisher
from prefixcache.types import NO_EXTRA_KEYS, ExtraKeys, Lora, MultimodalItem
from tests.server.zmq_subscriber import (
    TIMEOUT_MS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Subscriber,
    apply,
    events_in,
)
from tests.support.mirror import Mirror, index_of
from tests.support.waiting import until

OWNER = b"a client"
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon(CacheOptions(64, 4, hash_seed="a seed", event_buffer_bytes=MIN_BUFFER_BYTES))
    yield made
    made.close()


@contextmanager
def publishing(
    daemon: Daemon,
    topic: str = "",
    *,
    endpoint: str = ANY_PORT,
    replay: str | None = ANY_PORT,
    **limits: int,
) -> Iterator[ZmqPublisher]:
    encoder = VllmEncoder(block_size=4, digest_bytes=32, medium="GPU")
    publisher = ZmqPublisher(daemon.sequences, encoder.encode, endpoint, replay, topic, **limits)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(daemon: Daemon, publisher: ZmqPublisher, topic: str = "") -> Iterator[Subscriber]:
    """Once messages come through: a subscription takes a while to reach its publisher."""
    with Subscriber(publisher.endpoint, topic) as subscriber:

        def has_come() -> bool:
            with daemon.sequences.lock:
                daemon.sequences.pool.clear()
            return bool(subscriber.poll(20))

        until(has_come)
        last = daemon.sequences.pool.events.next_number - 1
        read: list[Event] = []
        while not subscriber.messages or subscriber.messages[-1][1] != last:
            read = subscriber.read()
        assert read == [AllBlocksCleared()]
        yield subscriber


def fill(
    daemon: Daemon, first: int, num_tokens: int, extra_keys: ExtraKeys = NO_EXTRA_KEYS
) -> None:
    sequences = daemon.sequences
    prompt = sequences.prepare(np.arange(first, first + num_tokens, dtype=np.uint32), extra_keys)
    with sequences.lock:
        held = sequences.allocate(OWNER, "", prompt)
        start = held.num_cached_tokens
        sequences.rows.commit(OWNER, [CommitRow(held.sequence_id, start, num_tokens - start)])
        sequences.free(OWNER, [held.sequence_id])


def short_index(daemon: Daemon) -> set[bytes]:
    return {block_hash[-8:] for block_hash in index_of(daemon.sequences.pool)}


def test_a_mirror_made_of_messages_is_the_index(daemon: Daemon) -> None:
    mirror, log = Mirror(), daemon.sequences.pool.events
    with publishing(daemon) as publisher, subscribed(daemon, publisher) as subscriber:
        first = subscriber.messages[-1][1] + 1
        for start in (0, 1000, 0, 2000, 3000):
            fill(daemon, start, 100)
        end = log.next_number
        for _ in range(first, end):
            for event in subscriber.read():
                apply(mirror, event)
        assert [number for _, number, _ in subscriber.messages[-(end - first) :]] == list(
            range(first, end)
        )
    assert mirror.parent_of.keys() == short_index(daemon)
    assert any(
        isinstance(event, BlockRemoved)
        for _, _, payload in subscriber.messages
        for event in events_in(payload)
    )


def test_a_message_says_what_vllm_says(daemon: Daemon) -> None:
    keys = ExtraKeys(Lora("poet", "/v1"), (MultimodalItem("cat", 2, 3),), "salt")
    with publishing(daemon) as publisher, subscribed(daemon, publisher) as subscriber:
        fill(daemon, 10, 9, keys)
        (event,) = subscriber.read()
    prompt = daemon.sequences.prepare(np.arange(10, 18, dtype=np.uint32), keys)
    assert prompt.chain is not None
    assert event == BlockStored(
        block_hashes=[int.from_bytes(digest[-8:], "big") for digest in prompt.chain.hashes],
        parent_block_hash=None,
        token_ids=list(range(10, 18)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name="poet",
        extra_keys=[["poet", ["cat", 2], "salt"], ["poet", ["cat", -2]]],
        group_idx=0,
    )


def test_without_extra_keys_a_message_has_none_and_names_the_parent(daemon: Daemon) -> None:
    with publishing(daemon) as publisher, subscribed(daemon, publisher) as subscriber:
        fill(daemon, 0, 4)
        fill(daemon, 0, 13)
        (first,), (second,) = subscriber.read(), subscriber.read()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys is None
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == list(range(4, 12))


def test_what_was_missed_is_replayed(daemon: Daemon) -> None:
    fill(daemon, 0, 50)
    fill(daemon, 1000, 50)
    with publishing(daemon, "kv") as publisher, subscribed(daemon, publisher, "kv") as subscriber:
        fill(daemon, 2000, 50)
        subscriber.read()
        end = daemon.sequences.pool.events.next_number
        assert publisher.replay_endpoint is not None
        replayed = subscriber.replay(publisher.replay_endpoint, 0)
        assert [number for _, number, _ in replayed] == list(range(end))
        assert replayed[-len(subscriber.messages) :] == subscriber.messages
        assert {topic for topic, _, _ in replayed} == {b"kv"}
        assert subscriber.replay(publisher.replay_endpoint, end - 1) == replayed[-1:]
        for number in (end, 2**64 - 1):
            assert subscriber.replay(publisher.replay_endpoint, number) == []
    mirror = Mirror()
    for _, _, payload in replayed:
        for event in events_in(payload):
            apply(mirror, event)
    assert mirror.parent_of.keys() == short_index(daemon)


def test_a_replay_of_more_messages_than_may_wait_comes_whole(daemon: Daemon) -> None:
    log = daemon.sequences.pool.events
    with (
        publishing(daemon, max_unread_events=0, max_unread_replies=100) as publisher,
        subscribed(daemon, publisher) as subscriber,
    ):
        numbers = itertools.count(1000, 1000)
        while not log.first_number:
            fill(daemon, next(numbers), 5)
        first, end = log.first_number, log.next_number
        while subscriber.messages[-1][1] != end - 1:
            subscriber.read()
        assert publisher.replay_endpoint is not None
        replayed = subscriber.replay(publisher.replay_endpoint, 0)
    assert [number for _, number, _ in replayed] == list(range(first, end))


def test_each_gap_of_a_subscriber_that_is_too_slow_is_counted() -> None:
    daemon = Daemon(CacheOptions(64, 4, event_buffer_bytes=2**24))
    log = daemon.sequences.pool.events
    numbers = itertools.count(1000, 1000)
    with (
        closing(daemon),
        publishing(daemon, max_unread_events=100) as publisher,
        subscribed(daemon, publisher) as subscriber,
    ):
        first = subscriber.messages[-1][1]
        start = log.num_gaps[Reader.ZMQ]

        def all_is_published() -> bool:
            assert publisher.replay_endpoint is not None
            return bool(subscriber.replay(publisher.replay_endpoint, log.next_number - 1))

        def has_come_to_the_end() -> bool:
            fill(daemon, next(numbers), 8)
            while subscriber.poll(20):
                subscriber.read()
            return subscriber.messages[-1][1] == log.next_number - 1

        def gaps() -> list[tuple[int, int]]:
            seen = [number for _, number, _ in subscriber.messages if number >= first]
            return [(one, after) for one, after in itertools.pairwise(seen) if after != one + 1]

        def has_missed_more() -> bool:
            num_gaps, num_seen = log.num_gaps[Reader.ZMQ], len(gaps())
            while log.num_gaps[Reader.ZMQ] == num_gaps:  # Nothing is read: no room is left.
                for _ in range(100):
                    fill(daemon, next(numbers), 200)
                until(all_is_published)  # So the publisher itself is never too slow.
            until(has_come_to_the_end)
            return len(gaps()) > num_seen

        # What had no room may have it in the moment of the drop: that is counted, and no gap.
        for _ in range(2):
            until(has_missed_more)
        assert 2 <= len(gaps()) <= log.num_gaps[Reader.ZMQ] - start


def test_a_request_that_is_none_is_passed_over(daemon: Daemon) -> None:
    fill(daemon, 0, 8)
    with publishing(daemon) as publisher, subscribed(daemon, publisher) as subscriber:
        assert publisher.replay_endpoint is not None
        subscriber.send_to(publisher.replay_endpoint, (b"",), (b"", b"x"), (b"", b"12345678", b"y"))
        assert subscriber.replay(publisher.replay_endpoint, 0)


def test_an_address_that_is_taken_is_refused(daemon: Daemon) -> None:
    with publishing(daemon) as publisher:
        for options, field in (
            ({"endpoint": publisher.endpoint}, "events_zmq"),
            ({"replay": publisher.endpoint}, "events_zmq_replay"),
        ):
            with (
                pytest.raises(InvalidArgumentError, match="cannot bind") as caught,
                publishing(daemon, **options),
            ):
                raise AssertionError("two daemons publish at one address")
            assert caught.value.field == field


def test_what_was_stored_before_the_end_is_published(daemon: Daemon) -> None:
    with (
        publishing(daemon, linger_ms=TIMEOUT_MS) as publisher,
        subscribed(daemon, publisher) as subscriber,
    ):
        for start in range(0, 5000, 1000):
            fill(daemon, start, 40)
        end = daemon.sequences.pool.events.next_number
        publisher.close()
        while subscriber.messages[-1][1] != end - 1:
            subscriber.read()


def test_the_thread_may_end_before_it_is_woken_to_end(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.eventfd_write

    def write_when_it_has_ended(fd: int, value: int) -> None:
        write(fd, value)
        for thread in threading.enumerate():
            if thread.name == "zmq-events":
                thread.join()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_when_it_has_ended)
    with publishing(daemon):
        pass
