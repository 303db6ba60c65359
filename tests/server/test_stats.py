"""GetStats: every number means what it says, and the parts add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixcache.rpc._pb import admin_pb2, cache_pb2
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import running_daemon
from tests.support.stubs import Peer, Refused, Stubs, connected
from tests.support.toy_model import Run, ToyModel

NUM_BLOCKS, BLOCK_SIZE = 8, 4


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    with (
        running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE)) as running,
        connected(running.target) as stubs,
    ):
        yield stubs


def fill(stubs: Stubs, tokens: range | list[int]) -> None:
    peer = Peer(stubs)
    reply = peer.allocate(tokens)
    cached = reply.num_cached_tokens
    assert peer.commit(reply.sequence_id, cached, len(tokens) - cached) == 1
    peer.free(reply.sequence_id)


def checked(stubs: Stubs) -> admin_pb2.GetStatsResponse:
    """The statistics, after what must hold of them at all times."""
    stats = stubs.stats()
    assert stats.referenced + stats.evictable + stats.blank == stats.num_blocks
    assert stats.evictable <= stats.cached <= stats.referenced + stats.evictable
    assert stats.slots_written <= stats.referenced * stats.block_size
    assert stats.hit_tokens <= stats.queries_tokens
    assert stats.hit_blocks <= stats.queries_blocks
    return stats


def test_a_fresh_daemon_has_counted_nothing(stubs: Stubs) -> None:
    stats = checked(stubs)
    assert stats.uptime_s > 0
    stats.ClearField("uptime_s")
    assert stats == admin_pb2.GetStatsResponse(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, blank=NUM_BLOCKS
    )


def test_half_the_pool_filled_and_freed_is_cached_and_not_used(stubs: Stubs) -> None:
    fill(stubs, range(NUM_BLOCKS // 2 * BLOCK_SIZE))
    stats = checked(stubs)
    assert (stats.referenced, stats.evictable, stats.blank) == (0, 4, 4)
    stubs.reset()
    stats = checked(stubs)
    assert (stats.referenced, stats.evictable, stats.blank, stats.resets) == (0, 0, NUM_BLOCKS, 1)


def test_block_and_slot_numbers_tell_half_empty_blocks_apart() -> None:
    with running_daemon(CacheOptions(256, 16)) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        ids = [peer.allocate(range(i, i + 17)).sequence_id for i in range(0, 10_000, 100)]
        stats = checked(stubs)
        assert (stats.referenced, stats.slots_written, stats.sequences) == (200, 0, 100)
        for sequence_id in ids:
            peer.commit(sequence_id, 0, 17)
        stats = checked(stubs)
        assert (stats.referenced, stats.slots_written) == (200, 1700)
        peer.free(*ids)
        stats = checked(stubs)
        assert (stats.referenced, stats.slots_written, stats.evictable) == (0, 0, 100)


def test_a_slot_that_several_sequences_hold_counts_once(stubs: Stubs) -> None:
    peer = Peer(stubs)
    parent = peer.allocate(range(6)).sequence_id
    peer.commit(parent, 0, 6)
    peer.fork(parent, 6, ["", ""])
    peer.allocate([*range(4), 50, 51])
    stats = checked(stubs)
    assert (stats.referenced, stats.slots_written, stats.sequences) == (3, 6, 4)


def test_hits_are_the_tokens_that_are_not_computed(stubs: Stubs) -> None:
    fill(stubs, range(8))
    reply = Peer(stubs).allocate(range(8))
    stats = checked(stubs)
    assert reply.num_cached_tokens == stats.hit_tokens == 7
    assert (stats.queries_tokens, stats.queries_blocks, stats.hit_blocks) == (16, 4, 2)
    assert (stats.prefill_tokens_cached, stats.prefill_tokens_computed) == (7, 8)
    assert stats.requests == 2


@pytest.mark.parametrize(
    ("cache_use", "queries", "hits"),
    [
        (cache_pb2.CACHE_USE_READ_WRITE, 10, 8),
        (cache_pb2.CACHE_USE_NO_WRITE, 10, 8),
        (cache_pb2.CACHE_USE_NO_READ, 0, 0),
        (cache_pb2.CACHE_USE_NONE, 0, 0),
    ],
)
def test_only_who_reads_the_cache_is_a_query(
    stubs: Stubs, cache_use: int, queries: int, hits: int
) -> None:
    fill(stubs, range(8))
    before = stubs.stats()
    assert Peer(stubs).allocate(range(10), cache_use=cache_use).num_cached_tokens == hits
    after = checked(stubs)
    assert after.queries_tokens - before.queries_tokens == queries
    assert after.hit_tokens - before.hit_tokens == hits
    assert after.requests - before.requests == 1


def test_lookups_and_refusals_are_no_queries(stubs: Stubs) -> None:
    fill(stubs, range(8))
    peer, before = Peer(stubs), stubs.stats()
    blocker = peer.allocate(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE)).sequence_id
    counted = stubs.stats()
    for _ in range(5):
        stubs.lookup(range(12))
        with pytest.raises(Refused):
            peer.allocate(range(12))
    refused = checked(stubs)
    assert refused.allocation_refused == 5
    assert refused.queries_tokens == counted.queries_tokens
    peer.free(blocker)
    peer.allocate(range(12))
    after = checked(stubs)
    assert after.queries_tokens - counted.queries_tokens == 12
    assert after.requests - before.requests == 2
    assert after.allocation_refused == 5


def test_rows_of_append_without_room_have_a_counter_of_their_own(stubs: Stubs) -> None:
    peer = Peer(stubs)
    sequence_id = peer.allocate(range(4)).sequence_id
    peer.allocate(range(100, 100 + (NUM_BLOCKS - 1) * BLOCK_SIZE))
    assert peer.append(sequence_id, 4, [1]).code == cache_pb2.RESULT_CODE_NO_ROOM
    assert peer.append(sequence_id, 3, [1]).code == cache_pb2.RESULT_CODE_WRONG_POSITION
    stats = checked(stubs)
    assert (stats.append_refused, stats.allocation_refused) == (1, 0)


def test_a_preempted_request_does_not_raise_the_hit_rate(stubs: Stubs) -> None:
    peer = Peer(stubs)
    first = peer.allocate(range(10)).sequence_id
    peer.commit(first, 0, 10)
    peer.free(first)
    assert peer.allocate(range(10), resumed=True).num_cached_tokens == 8
    stats = checked(stubs)
    assert (stats.requests, stats.queries_tokens, stats.hit_tokens) == (1, 10, 0)
    assert (stats.resumed_requests, stats.resumed_queries_tokens) == (1, 10)
    assert stats.resumed_hit_tokens == 8


def test_evictions_count_the_blocks_that_lost_their_hash(stubs: Stubs) -> None:
    fill(stubs, range(NUM_BLOCKS * BLOCK_SIZE))
    assert checked(stubs).evictions == 0
    for number in range(3):
        Peer(stubs).allocate([1000 + number])
        stats = checked(stubs)
        assert (stats.evictions, stats.cached) == (number + 1, NUM_BLOCKS - number - 1)


def test_owners_are_those_with_live_sequences(stubs: Stubs) -> None:
    peers = [Peer(stubs) for _ in range(3)]
    ids = [peer.allocate([n]).sequence_id for n, peer in enumerate(peers)]
    peers[0].allocate([9])
    stats = checked(stubs)
    assert (stats.sequences, stats.owners) == (4, 3)
    peers[1].free(ids[1])
    stats = checked(stubs)
    assert (stats.sequences, stats.owners) == (3, 2)


def test_prompt_tokens_count_as_computed_when_the_last_layer_has_them() -> None:
    layout = KVLayout(2, 1, 8, BLOCK_SIZE, "float32")
    with (
        running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE), ModelOptions(layout)) as running,
        connected(running.target) as stubs,
    ):
        run = Run(Peer(stubs), ToyModel(layout, 2), list(range(7))).allocate()
        run.compute_layer(0)
        assert checked(stubs).prefill_tokens_computed == 0
        run.compute_layer(1, 5)
        stats = checked(stubs)
        assert (stats.prefill_tokens_computed, stats.slots_written) == (5, 5)
        run.compute_layer(1)
        run.append([7, 8])
        run.compute(name="Decode")
        stats = checked(stubs)
        assert (stats.prefill_tokens_computed, stats.slots_written) == (7, 9)


def test_calls_count_by_rpc_once_they_have_ended(stubs: Stubs) -> None:
    peer = Peer(stubs)
    peer.allocate(range(4))
    with pytest.raises(Refused):
        peer.allocate(range(1000))
    # A GetStats that is being answered is no part of its own reply.
    assert [call.method for call in stubs.stats().calls] == ["Allocate"]
    stubs.stats()
    calls = {call.method: call for call in stubs.stats().calls}
    assert calls.keys() == {"Allocate", "GetStats"}
    assert (calls["Allocate"].ended, calls["Allocate"].failed) == (2, 1)
    assert (calls["GetStats"].ended, calls["GetStats"].failed) == (2, 0)
    assert 0 < calls["Allocate"].duration_s < 60
