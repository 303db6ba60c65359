"""Refusals for want of room: exact, at once, and with what its caller can act on."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from prefixcache import Client
from prefixcache.core.sessions import owner_digest
from prefixcache.errors import ExceedsPoolError, NoRoomError
from prefixcache.rpc._pb import cache_pb2, session_pb2
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import running_daemon
from tests.support.stubs import Peer, Refused, Row, Stubs, connected, refusals

NUM_BLOCKS, B = 8, 4


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    with running_daemon(CacheOptions(NUM_BLOCKS, B)) as running, connected(running.target) as made:
        yield made


def session(stubs: Stubs, name: str) -> Peer:
    request = session_pb2.OpenSessionRequest(ttl_s=60.0, client_name=name)
    return Peer(stubs, stubs.call("OpenSession", request).session_id)


def refused_allocate(peer: Peer, num_tokens: int) -> Refused:
    tokens = range(1000, 1000 + num_tokens)
    request = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=tokens)
    return peer.stubs.refused("Allocate", request)


def test_a_refusal_has_the_numbers_of_lookup_and_names_who_holds_most(stubs: Stubs) -> None:
    large, small = session(stubs, "engine 'é' 1"), Peer(stubs)
    large.allocate(range(5 * B))
    small.allocate(range(100, 100 + B))
    found = stubs.lookup(range(1000, 1000 + 3 * B))
    refusal = refused_allocate(small, 3 * B)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM")
    boot_id = refusal.numbers["boot_id"]
    assert refusal.numbers == {
        "boot_id": boot_id,
        "needed": str(found.num_blocks_needed),
        "free": str(found.num_blocks_free),
        "referenced": "6",
        "holder_1_name": "engine 'é' 1",
        "holder_1_digest": owner_digest(large.owner),
        "holder_1_blocks": "5",
        "holder_2_name": "",
        "holder_2_digest": owner_digest(small.owner),
        "holder_2_blocks": "1",
    }
    assert refusal.message.startswith("needs 3 blocks, 2 free, 6 referenced; most held: 5 by ")
    assert large.owner.hex() not in refusal.message


def test_what_is_as_large_as_the_pool_fits_and_one_token_more_never_does(stubs: Stubs) -> None:
    peer = Peer(stubs)
    permanent = refused_allocate(peer, NUM_BLOCKS * B + 1)
    assert (permanent.code, permanent.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "EXCEEDS_POOL",
    )
    assert permanent.retry_delay_s is None
    assert (permanent.numbers["needed"], permanent.numbers["num_blocks"]) == ("9", "8")
    whole = peer.allocate(range(NUM_BLOCKS * B))
    transient = refused_allocate(peer, NUM_BLOCKS * B)
    assert transient.reason == "NO_ROOM"
    assert transient.retry_delay_s == 0.1
    assert refused_allocate(peer, NUM_BLOCKS * B + 1).reason == "EXCEEDS_POOL"
    peer.free(whole.sequence_id)
    peer.allocate(range(1000, 1000 + NUM_BLOCKS * B))


def test_in_a_step_a_refusal_says_the_same(stubs: Stubs) -> None:
    peer = session(stubs, "stepping")
    peer.allocate(range(6 * B))
    requests = [
        cache_pb2.AllocateRequest(owner=peer.owner, token_ids=range(1000, 1000 + num_tokens))
        for num_tokens in (3 * B, NUM_BLOCKS * B + 1)
    ]
    with stubs.steps() as steps:
        refused = refusals(steps.run(cache_pb2.StepRequest(allocates=requests)))
    transient, permanent = refused["allocates", 0], refused["allocates", 1]
    assert (transient.reason, transient.retry_delay_s) == ("NO_ROOM", 0.1)
    assert transient.numbers["holder_1_name"] == "stepping"
    assert (permanent.reason, permanent.retry_delay_s) == ("EXCEEDS_POOL", None)


def test_two_that_hold_half_each_are_refused_at_once_and_one_that_frees_lets_the_other_on(
    stubs: Stubs,
) -> None:
    one, two = Peer(stubs), Peer(stubs)
    half = NUM_BLOCKS // 2 * B
    held = [peer.allocate(range(n, n + half)) for n, peer in ((0, one), (500, two))]
    for _ in range(3):
        for peer, own in ((one, held[0]), (two, held[1])):
            row = peer.append(own.sequence_id, half, [1])
            assert row.code == cache_pb2.RESULT_CODE_NO_ROOM
            assert refused_allocate(peer, half).reason == "NO_ROOM"
    one.free(held[0].sequence_id)
    appended = two.append_rows([Row(held[1].sequence_id, half, tuple(range(half)))])
    assert len(appended[0].new_block_ids) == NUM_BLOCKS // 2


def test_a_request_that_never_fits_holds_up_no_other(stubs: Stubs) -> None:
    """Waiting ones too: what cannot fit is refused before it waits."""
    peer = Peer(stubs)
    tokens = range(NUM_BLOCKS * B + 1)
    peer.allocate(tokens[: 2 * B])
    request = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=tokens, wait_pending_ms=60_000)
    assert stubs.refused("Allocate", request).reason == "EXCEEDS_POOL"
    assert peer.allocate(range(500, 500 + B)).sequence_id


def test_python_clients_get_the_names_as_fields() -> None:
    with (
        running_daemon(CacheOptions(NUM_BLOCKS, B)) as running,
        Client(running.target, client_name="holder") as holder,
        Client(running.target) as client,
    ):
        holder.sequence(range(7 * B))
        with pytest.raises(NoRoomError) as refused:
            client.sequence(range(1000, 1000 + 2 * B))
        assert refused.value.fields["holder_1_name"] == "holder"
        assert refused.value.fields["holder_1_blocks"] == "7"
        assert [info.owner_digest for info in client.list_sequences()] == [
            refused.value.fields["holder_1_digest"]
        ]
        with pytest.raises(ExceedsPoolError):
            client.sequence(range(NUM_BLOCKS * B + 1))
