"""The block manager over the wire: two clients, retries, extra keys, copies by the client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import grpc
import pytest

from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants, snapshot
from tests.support.stubs import Appended, Peer, Row, Stubs, connected, read_append

NUM_BLOCKS, BLOCK_SIZE = 16, 4
OK = cache_pb2.RESULT_CODE_OK


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE)) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs
        with running.daemon.sequences.lock:
            check_invariants(running.daemon.sequences)


def fill(stubs: Stubs, tokens: range | list[int], **fields: object) -> list[int]:
    """Cache a prompt and free it; returns its blocks."""
    peer = Peer(stubs)
    reply = peer.allocate(tokens, **fields)
    cached = reply.num_cached_tokens
    assert peer.commit(reply.sequence_id, cached, len(tokens) - cached) == OK
    peer.free(reply.sequence_id)
    return list(reply.block_ids)


# ---- two clients


def test_a_prompt_that_is_not_committed_is_hit_by_nobody(stubs: Stubs) -> None:
    first, second, third = Peer(stubs), Peer(stubs), Peer(stubs)
    writer = first.allocate(range(8))
    assert second.allocate(range(8)).num_cached_tokens == 0
    first.commit(writer.sequence_id, 0, 8)
    assert third.allocate(range(9)).num_cached_tokens == 8


def test_a_prefix_in_use_is_shared_with_other_owners(stubs: Stubs) -> None:
    first, second = Peer(stubs), Peer(stubs)
    held = first.allocate(range(14))
    first.commit(held.sequence_id, 0, 14)
    assert stubs.lookup([*range(12), 50]).num_blocks_needed == 1
    reply = second.allocate([*range(12), 50])
    assert (reply.num_cached_tokens, reply.block_ids[:3]) == (12, held.block_ids[:3])
    assert stubs.stats().referenced == 5


def test_a_lookup_promises_nothing(stubs: Stubs) -> None:
    fill(stubs, range(8))
    assert stubs.lookup(range(9)).num_cached_tokens == 8
    taker = Peer(stubs)
    taker.free(taker.allocate(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE)).sequence_id)
    assert Peer(stubs).allocate(range(9)).num_cached_tokens == 0


def test_lookups_hold_nothing_and_change_no_order(running: RunningDaemon, stubs: Stubs) -> None:
    fill(stubs, range(8))
    fill(stubs, range(50, 58))  # younger than what is looked up
    before = snapshot(running.daemon.sequences)
    for _ in range(5):
        stubs.lookup(range(8), num_lookahead_tokens=3, want_hashes=True)
    assert snapshot(running.daemon.sequences) == before
    assert len(Peer(stubs).allocate(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE)).block_ids) == 16


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 12, 16])
@pytest.mark.parametrize("num_lookahead_tokens", [0, 1, 4])
def test_the_need_that_a_lookup_says_is_what_allocate_takes(
    stubs: Stubs, num_tokens: int, num_lookahead_tokens: int
) -> None:
    fill(stubs, range(8))
    found = stubs.lookup(range(num_tokens), num_lookahead_tokens=num_lookahead_tokens)
    before = stubs.stats()
    assert found.num_blocks_free == before.evictable + before.blank
    Peer(stubs).allocate(range(num_tokens), num_lookahead_tokens=num_lookahead_tokens)
    assert stubs.stats().referenced - before.referenced == found.num_blocks_needed


# ---- retries


def test_a_repeated_allocate_gets_the_first_reply_and_no_second_reference(
    running: RunningDaemon, stubs: Stubs
) -> None:
    fill(stubs, range(4))
    peer = Peer(stubs)
    first = peer.allocate(range(6), request_id="r", num_lookahead_tokens=2)
    before = snapshot(running.daemon.sequences)
    assert peer.allocate(range(6), request_id="r", num_lookahead_tokens=2) == first
    assert snapshot(running.daemon.sequences) == before
    another = Peer(stubs).allocate(range(6), request_id="r")
    assert another.sequence_id != first.sequence_id, "a request id is the owner's own"
    assert peer.free(first.sequence_id, first.sequence_id) == [
        OK,
        cache_pb2.RESULT_CODE_NOT_FOUND,
    ]
    assert peer.allocate(range(50, 52), request_id="r").sequence_id != first.sequence_id


def test_free_answers_for_ids_first_and_for_request_ids_after_them(
    running: RunningDaemon, stubs: Stubs
) -> None:
    peer = Peer(stubs)
    sequence_id = peer.allocate(range(6)).sequence_id
    peer.allocate(range(6), request_id="r")
    request = cache_pb2.FreeRequest(
        owner=peer.owner, sequence_ids=[1, sequence_id], request_ids=["r", "r", "unknown"]
    )
    unknown = cache_pb2.RESULT_CODE_NOT_FOUND
    codes = list(stubs.call("Free", request).result_codes)
    assert codes == [unknown, OK, OK, unknown, unknown]
    assert running.daemon.sequences.stats().referenced == 0


@pytest.mark.parametrize(
    "other",
    [
        {"token_ids": range(1, 7)},
        {"token_ids": range(7)},
        {"num_lookahead_tokens": 1},
        {"cache_use": cache_pb2.CACHE_USE_NONE},
        {"full_hit": cache_pb2.FULL_HIT_LAST_BLOCK},
        {"resumed": True},
        {"extra_keys": cache_pb2.ExtraKeys(cache_salt="s")},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_request_id_with_other_content_is_refused(stubs: Stubs, other: dict[str, object]) -> None:
    peer = Peer(stubs)
    peer.allocate(range(6), request_id="r")
    fields = {"token_ids": range(6), **other}
    request = cache_pb2.AllocateRequest(owner=peer.owner, request_id="r", **fields)
    refusal = stubs.refused("Allocate", request)
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "REQUEST_ID_CONFLICT",
    )


def test_a_sequence_that_has_gone_on_does_not_answer_for_its_allocate(stubs: Stubs) -> None:
    peer = Peer(stubs)
    sequence_id = peer.allocate(range(6), request_id="r").sequence_id
    peer.append(sequence_id, 6, [6])
    request = cache_pb2.AllocateRequest(owner=peer.owner, request_id="r", token_ids=range(6))
    assert stubs.refused("Allocate", request).reason == "REQUEST_ID_CONFLICT"


def test_every_changing_call_that_comes_twice_is_applied_once(
    running: RunningDaemon, stubs: Stubs
) -> None:
    peer = Peer(stubs)
    sequence_id = peer.allocate(range(6)).sequence_id
    calls = [
        lambda: peer.commit(sequence_id, 0, 6),
        lambda: peer.fork(sequence_id, 6, ["a", "b"]),
        lambda: peer.append(sequence_id, 6, [6, 7, 8], num_lookahead_tokens=3),
        lambda: peer.commit(sequence_id, 6, 3),
        lambda: peer.truncate(sequence_id, 9, 5),
    ]
    for call in calls:
        first = call()
        before = snapshot(running.daemon.sequences)
        assert call() == first
        assert snapshot(running.daemon.sequences) == before
    assert peer.append(sequence_id, 9, [9]).code == cache_pb2.RESULT_CODE_WRONG_POSITION
    assert peer.append(sequence_id, 5, [5]).code == OK


def test_a_repeated_batch_repeats_the_rows_that_were_applied(stubs: Stubs) -> None:
    peer = Peer(stubs)
    ids = [peer.allocate([n, n]).sequence_id for n in range(2)]
    rows = [Row(ids[0], 2, (5, 5, 5)), Row(ids[1], 9, (5,))]
    first = peer.append_rows(rows)
    assert [row.code for row in first] == [OK, cache_pb2.RESULT_CODE_WRONG_POSITION]
    assert peer.append_rows(rows) == first


# ---- copies without storage


def test_the_client_copies_and_the_source_is_held_until_its_next_call(stubs: Stubs) -> None:
    peer = Peer(stubs)
    reply = peer.allocate(range(6))
    peer.commit(reply.sequence_id, 0, 6)
    child = peer.fork(reply.sequence_id, 6)[0]
    row = peer.append(child, 6, [70, 71])
    ((source, destination),) = row.copies
    assert source == reply.block_ids[1] and row.new_block_ids == ()
    peer.free(reply.sequence_id)
    assert stubs.stats().referenced == 3, "the shared block, the source and the copy"
    assert peer.append(child, 6, [70, 71]) == row, "a repeat"
    assert stubs.stats().referenced == 3
    assert peer.commit(child, 6, 2) == OK
    stats = stubs.stats()
    assert stats.referenced == 2
    taken = peer.allocate(range(100, 100 + (NUM_BLOCKS - 2) * BLOCK_SIZE)).block_ids
    assert source in taken and destination not in taken


def test_rows_and_their_blocks_and_copies_belong_together(stubs: Stubs) -> None:
    peer = Peer(stubs)
    lengths = (4, 6, 1, 8)
    ids = []
    for number, length in enumerate(lengths):
        tokens = range(100 * number, 100 * number + length)
        ids.append(peer.allocate(tokens).sequence_id)
        peer.commit(ids[-1], 0, length)
    peer.fork(ids[1], 6)
    peer.fork(ids[3], 8)
    rows = [
        Row(sequence_id, length, tuple(range(5)))
        for sequence_id, length in zip(ids, lengths, strict=True)
    ]
    reply = stubs.call("Append", peer.append_request(rows))
    results = read_append(reply)
    assert [len(row.new_block_ids) for row in results] == [2, 1, 1, 2]
    assert [len(row.copies) for row in results] == [0, 1, 0, 0]
    assert len({block for row in results for block in row.new_block_ids}) == 6
    stats = stubs.stats()
    assert reply.num_blocks_free == stats.evictable + stats.blank
    assert all(isinstance(row, Appended) and row.code == OK for row in results)


# ---- extra keys


def image(identifier: str, offset: int, num_tokens: int) -> cache_pb2.ExtraKeys:
    item = cache_pb2.MultimodalItem(identifier=identifier, offset=offset, num_tokens=num_tokens)
    return cache_pb2.ExtraKeys(multimodal_items=[item])


def lora(name: str, path: str = "") -> cache_pb2.ExtraKeys:
    return cache_pb2.ExtraKeys(lora=cache_pb2.Lora(name=name, path=path))


def salt(text: str) -> cache_pb2.ExtraKeys:
    return cache_pb2.ExtraKeys(cache_salt=text)


def embeds(offset: int, num_tokens: int, *contents: str) -> cache_pb2.ExtraKeys:
    digests = [hashlib.sha256(content.encode()).digest() for content in contents]
    span = cache_pb2.PromptEmbeds(offset=offset, num_tokens=num_tokens, digests=digests)
    return cache_pb2.ExtraKeys(prompt_embeds=[span])


NONE = cache_pb2.ExtraKeys()


@pytest.mark.parametrize(
    ("stored", "asked", "num_cached_tokens"),
    [
        (salt("a"), salt("a"), 12),
        (salt("a"), salt("b"), 0),
        (salt("a"), NONE, 0),
        (NONE, salt("a"), 0),
        (lora("a", "v1"), lora("a", "v1"), 12),
        (lora("a", "v1"), lora("a", "v2"), 0),
        (lora("a", "v1"), lora("a"), 0),
        (lora("a", "v1"), NONE, 0),
        (lora("S"), salt("S"), 0),
        (salt("S"), lora("S"), 0),
        (image("A", 6, 4), image("A", 6, 4), 12),
        (image("A", 6, 4), image("B", 6, 4), 4),
        (image("A", 6, 4), image("A", 7, 4), 4),
        (image("A", 6, 4), NONE, 4),
        (image("A", 2, 4), image("A", 3, 4), 0),
        (embeds(5, 5, "x", "y"), embeds(5, 5, "x", "y"), 12),
        (embeds(5, 5, "x", "y"), embeds(5, 5, "x", "z"), 8),
        (embeds(5, 5, "x", "y"), embeds(5, 5, "z", "y"), 4),
    ],
)
def test_blocks_are_shared_only_under_equal_extra_keys(
    stubs: Stubs, stored: cache_pb2.ExtraKeys, asked: cache_pb2.ExtraKeys, num_cached_tokens: int
) -> None:
    fill(stubs, range(13), extra_keys=stored)
    found = stubs.lookup(range(13), extra_keys=asked)
    assert found.num_cached_tokens == num_cached_tokens
    assert Peer(stubs).allocate(range(13), extra_keys=asked).num_cached_tokens == num_cached_tokens


@pytest.mark.parametrize(
    "empty",
    [
        cache_pb2.ExtraKeys(),
        cache_pb2.ExtraKeys(cache_salt=""),
        cache_pb2.ExtraKeys(lora=cache_pb2.Lora()),
        cache_pb2.ExtraKeys(multimodal_items=[], prompt_embeds=[]),
    ],
)
def test_absent_and_empty_extra_keys_are_the_same(stubs: Stubs, empty: cache_pb2.ExtraKeys) -> None:
    absent = stubs.lookup(range(8), want_hashes=True)
    assert stubs.lookup(range(8), want_hashes=True, extra_keys=empty) == absent


def test_an_image_in_a_second_turn_tells_blocks_apart(stubs: Stubs) -> None:
    peer = Peer(stubs)
    turns = range(14)
    for identifier in ("A", "B"):
        first = peer.allocate(range(6))
        request = peer.append_request([Row(first.sequence_id, 6, tuple(turns[6:]))])
        request.extra_keys.add(row=0, extra_keys=image(identifier, 9, 2))
        assert list(stubs.call("Append", request).result_codes) == [OK]
        cached = first.num_cached_tokens
        assert peer.commit(first.sequence_id, cached, 14 - cached) == OK
    for identifier, num_cached_tokens in (("A", 12), ("B", 12), ("C", 8)):
        found = stubs.lookup(turns, extra_keys=image(identifier, 9, 2))
        assert found.num_cached_tokens == num_cached_tokens
    assert stubs.lookup(turns).num_cached_tokens == 8


def test_a_reset_is_refused_with_the_number_in_use_and_then_drops_all(stubs: Stubs) -> None:
    fill(stubs, range(8))
    peer = Peer(stubs)
    held = peer.allocate([50]).sequence_id
    refusal = stubs.refused("ResetCache", b"")
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "BLOCKS_IN_USE",
    )
    assert refusal.numbers["referenced"] == "1"
    assert stubs.lookup(range(9)).num_cached_tokens == 8
    peer.free(held)
    assert stubs.reset() == 2
    assert stubs.lookup(range(9)).num_cached_tokens == 0
    assert stubs.reset() == 0
