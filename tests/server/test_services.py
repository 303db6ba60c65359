"""What an operator and a foreign client see: health, reflection, description, listing, draining."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from prefixcache import __version__
from prefixcache.core.form import FORM
from prefixcache.core.hashing import HASH_RECIPE_VERSION
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, cache_pb2
from prefixcache.rpc.codec import layout_from_wire
from prefixcache.server.daemon import (
    MAX_STEP_ALLOCATES,
    CacheOptions,
    Daemon,
    LimitOptions,
    ModelOptions,
)
from prefixcache.server.rpc_server import RpcServer
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization, fingerprint
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.gate import held
from tests.support.stubs import TIMEOUT_S, Peer, Stubs, connected
from tests.support.waiting import until

LAYOUT = KVLayout(2, 1, 8, 4, "bfloat16")
SERVICES = [
    "prefixcache.v1.AdminService",
    "prefixcache.v1.SessionService",
    "prefixcache.v1.AttentionService",
    "prefixcache.v1.PrefixCacheService",
]
SEED = "a seed of the service tests"


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(16, 4, hash_seed=SEED)) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs


# ---- health


def test_every_service_is_serving(stubs: Stubs) -> None:
    health = health_pb2_grpc.HealthStub(stubs.channel)
    for service in ("", *SERVICES):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="unknown"), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("max_workers", [1, 4])
def test_a_daemon_that_stops_says_so_first_and_finishes_running_calls(max_workers: int) -> None:
    daemon = Daemon(CacheOptions(16, 4))
    server = RpcServer(daemon, max_workers=max_workers)
    target = server.listen("127.0.0.1:0")
    server.start()
    with connected(target) as stubs:
        health = health_pb2_grpc.HealthStub(stubs.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with held(daemon.sequences, "prepare") as gate:
            request = cache_pb2.LookupRequest(token_ids=[1, 2])
            running = [stubs.start("Lookup", request) for _ in range(max_workers)]
            for _ in range(max_workers):
                gate.wait()
            stopper = _Stopper(server)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert daemon.is_draining
            gate.release()
            for call in running:
                assert stubs.finish(call).num_blocks_needed == 1
            # It does not wait for the watch, which never ends.
            stopper.join()
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        refusal = stubs.refused("Lookup", cache_pb2.LookupRequest(token_ids=[1]))
        assert refusal.code is grpc.StatusCode.UNAVAILABLE


class _Stopper:
    """Stops a server in a thread of its own, as a signal handler's main thread would."""

    def __init__(self, server: RpcServer) -> None:
        self._thread = threading.Thread(target=server.stop, args=(10 * TIMEOUT_S,))
        self._thread.start()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def test_a_draining_daemon_takes_no_new_sequences_and_serves_those_it_has(
    running: RunningDaemon, stubs: Stubs
) -> None:
    peer = Peer(stubs)
    sequence_id = peer.allocate(range(6)).sequence_id
    running.daemon.is_draining = True
    for name, request in (
        ("Allocate", cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[1])),
        (
            "Fork",
            cache_pb2.ForkRequest(
                owner=peer.owner, sequence_id=sequence_id, num_tokens=6, request_ids=[""]
            ),
        ),
    ):
        refusal = stubs.refused(name, request)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert peer.commit(sequence_id, 0, 6) == cache_pb2.RESULT_CODE_OK
    assert peer.append(sequence_id, 6, [7]).code == cache_pb2.RESULT_CODE_OK
    assert stubs.lookup(range(6)).num_cached_tokens == 4
    assert peer.free(sequence_id) == [cache_pb2.RESULT_CODE_OK]


# ---- without our code


def test_a_client_with_nothing_but_reflection_can_work(stubs: Stubs) -> None:
    database = ProtoReflectionDescriptorDatabase(stubs.channel)
    assert set(SERVICES) <= set(database.get_services())
    pool = descriptor_pool.DescriptorPool(database)

    def call(method: str, **fields: Any) -> Any:
        service = pool.FindServiceByName("prefixcache.v1.PrefixCacheService")
        descriptor = service.methods_by_name[method]
        request = message_factory.GetMessageClass(descriptor.input_type)(**fields)
        reply_class = message_factory.GetMessageClass(descriptor.output_type)
        rpc = stubs.channel.unary_unary(
            f"/{service.full_name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply_class.FromString,
        )
        return rpc(request, timeout=TIMEOUT_S)

    owner, tokens = bytes(range(16)), list(range(9))
    assert call("Lookup", token_ids=tokens).num_cached_tokens == 0
    sequence = call("Allocate", owner=owner, token_ids=tokens)
    assert len(sequence.block_ids) == 3
    columns = {"sequence_ids": [sequence.sequence_id], "start_positions": [0]}
    call("Commit", owner=owner, num_computed_tokens=[9], **columns)
    assert call("Lookup", token_ids=tokens).num_cached_tokens == 8
    freed = call("Free", owner=owner, sequence_ids=[sequence.sequence_id])
    code = pool.FindEnumTypeByName("prefixcache.v1.ResultCode").values_by_name["RESULT_CODE_OK"]
    assert list(freed.result_codes) == [code.number]


def test_every_declared_rpc_is_found_by_reflection(stubs: Stubs) -> None:
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(stubs.channel))
    served = {
        f"/{name}/{method}"
        for name in SERVICES
        for method in pool.FindServiceByName(name).methods_by_name
    }
    assert served == {method.path for method in wire.methods()}


def test_open_streams_keep_no_call_waiting() -> None:
    """More health watches and reflection streams than there are workers, all of them silent."""
    over = threading.Event()

    def one_request_and_silence() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        over.wait()

    with (
        running_daemon(CacheOptions(16, 4), max_workers=2) as running,
        connected(running.target) as stubs,
    ):
        reflection = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
        health = health_pb2_grpc.HealthStub(stubs.channel)
        try:
            for _ in range(5):
                watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
                stream = reflection.ServerReflectionInfo(
                    one_request_and_silence(), timeout=TIMEOUT_S
                )
                assert next(stream).list_services_response.service
            assert stubs.stats().num_blocks == 16
        finally:
            over.set()


def test_watches_beyond_the_limit_are_refused_and_the_others_go_on() -> None:
    with running_daemon(CacheOptions(16, 4)) as running, connected(running.target) as stubs:
        health = health_pb2_grpc.HealthStub(stubs.channel)
        watches = [
            health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S) for _ in range(64)
        ]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        one_more = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as refused:
            next(one_more)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()
        until(lambda: is_watched(health))


def is_watched(health: health_pb2_grpc.HealthStub) -> bool:
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    try:
        next(watch)
    except grpc.RpcError:
        return False
    watch.cancel()
    return True


def test_watches_that_come_and_go_block_nobody(running: RunningDaemon, stubs: Stubs) -> None:
    def watch_and_leave(_: int) -> None:
        with connected(running.target) as own:
            health = health_pb2_grpc.HealthStub(own.channel)
            for _ in range(25):
                watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
                watch.cancel()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(watch_and_leave, range(8)))
    assert stubs.stats().num_blocks == 16


BUF = Path(sys.executable).with_name("buf")


def buf_curl(*arguments: str) -> dict[str, Any]:
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def test_buf_curl_works_over_tcp() -> None:
    daemon = Daemon(CacheOptions(16, 4, hash_seed=SEED))
    server = RpcServer(daemon, max_workers=4)
    target = server.listen("127.0.0.1:0")
    server.start()
    try:
        method = f"http://{target}/prefixcache.v1.PrefixCacheService/Lookup"
        reply = buf_curl("--data", '{"token_ids": [1, 2, 3, 4, 5], "want_hashes": true}', method)
        assert (reply["numBlocksNeeded"], reply["numBlocksFree"]) == (2, 16)
        assert len(reply["blockHashes"]) == 1
    finally:
        server.stop(1.0)


def test_buf_curl_works_over_a_unix_socket(running: RunningDaemon) -> None:
    path = running.target.removeprefix("unix:")
    method = "http://localhost/prefixcache.v1.AdminService/GetStats"
    assert buf_curl("--unix-socket", path, method)["numBlocks"] == 16


# ---- description


def test_the_description_says_what_a_client_needs() -> None:
    cache = CacheOptions(16, 4, hash_algorithm="xxh3", owner_ttl_s=12.5)
    model = ModelOptions(LAYOUT, name="org/model", revision="r1")
    with (
        running_daemon(cache, model, LimitOptions(2**20, 7)) as running,
        connected(running.target) as stubs,
    ):
        info = stubs.info()
        assert (info.api_version, info.server_version) == ("v1", __version__)
        assert info.boot_id == running.daemon.boot_id and len(info.boot_id) == 16
        assert info.layout == cache_pb2.KVLayout(
            num_layers=2,
            num_kv_heads=1,
            head_dim=8,
            dtype="bfloat16",
            block_bytes=2 * 2 * 1 * 4 * 8 * 2,
            value_dim=8,
        )
        assert (info.num_blocks, info.block_size, info.device) == (16, 4, "cpu")
        assert (info.hash_algorithm, info.hash_recipe_version) == ("xxh3", HASH_RECIPE_VERSION)
        assert not info.hash_seeded
        none_hash = running.daemon.sequences.hasher.none_hash
        assert info.none_hash_digest == hashlib.sha256(none_hash).digest()
        assert none_hash not in info.SerializeToString()
        assert info.verify_hits, "a digest that can collide is verified by default"
        assert info.prefix_caching
        assert (info.limits.max_message_bytes, info.limits.max_fork_children) == (2**20, 7)
        assert info.limits.max_step_allocates == MAX_STEP_ALLOCATES
        assert list(info.capabilities) == ["attention", "arenas"]
        assert (info.model_name, info.model_revision) == ("org/model", "r1")
        assert info.owner_ttl_s == 12.5
        assert info.core == FORM
        assert info.layout_fingerprint == fingerprint(
            LAYOUT,
            block_size=4,
            model_name="org/model",
            model_revision="r1",
            hash_algorithm="xxh3",
        )
        expected = cache_pb2.GetServerInfoRequest(expected_fingerprint=info.layout_fingerprint)
        assert stubs.call("GetServerInfo", expected) == info
        assert Peer(stubs).allocate([1], layout_fingerprint=info.layout_fingerprint).sequence_id


@pytest.mark.parametrize(
    ("layout", "description"),
    [
        (
            replace(LAYOUT, quantization=Quantization("float8_e4m3")),
            cache_pb2.KVLayout(
                num_layers=2,
                num_kv_heads=1,
                head_dim=8,
                dtype="bfloat16",
                block_bytes=2 * 2 * 1 * 4 * 8 + 2 * 2 * 1 * 4 * 4,
                value_dim=8,
                quantization=cache_pb2.Quantization(dtype="float8_e4m3", scales="token_head"),
            ),
        ),
        (
            LatentLayout(3, 16, 8, 4, "float16"),
            cache_pb2.KVLayout(
                num_layers=3,
                num_kv_heads=1,
                head_dim=24,
                dtype="float16",
                block_bytes=3 * 4 * 24 * 2,
                value_dim=16,
                latent_dim=16,
                rope_dim=8,
            ),
        ),
    ],
    ids=["quantised", "latent"],
)
def test_the_description_says_how_kv_are_stored(
    layout: Layout, description: cache_pb2.KVLayout
) -> None:
    with (
        running_daemon(CacheOptions(16, 4), ModelOptions(layout)) as running,
        connected(running.target) as stubs,
    ):
        assert stubs.info().layout == description
        assert layout_from_wire(stubs.info().layout, 4) == layout


def test_a_daemon_without_storage_describes_none(stubs: Stubs) -> None:
    info = stubs.info()
    assert not info.HasField("layout")
    assert (info.device, list(info.capabilities)) == ("none", ["commit"])
    assert info.hash_seeded and not info.verify_hits


def test_children_of_a_fork_are_limited_as_described() -> None:
    with (
        running_daemon(CacheOptions(16, 4), limits=LimitOptions(max_fork_children=3)) as running,
        connected(running.target) as stubs,
    ):
        peer = Peer(stubs)
        sequence_id = peer.allocate(range(5)).sequence_id
        peer.commit(sequence_id, 0, 5)
        request = cache_pb2.ForkRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens=5, request_ids=[""] * 4
        )
        refusal = stubs.refused("Fork", request)
        assert (refusal.field, "1 to 3" in refusal.message) == ("request_ids", True)
        assert len(peer.fork(sequence_id, 5, [""] * 3)) == 3


def hashes_and_digest(seed: str | None, algorithm: str) -> tuple[list[bytes], bytes]:
    cache = CacheOptions(8, 4, hash_algorithm=algorithm, hash_seed=seed)
    with running_daemon(cache) as running, connected(running.target) as stubs:
        found = stubs.lookup(range(11), want_hashes=True)
        return list(found.block_hashes), stubs.info().none_hash_digest


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash_cbor", "xxh3"])
def test_two_daemons_agree_on_hashes_if_they_share_a_seed(algorithm: str) -> None:
    first, second = (hashes_and_digest(SEED, algorithm) for _ in range(2))
    assert first == second
    assert len(first[0]) == 2
    others = [hashes_and_digest(seed, algorithm) for seed in (None, None, SEED + "!")]
    assert len({digest for _, digest in [first, *others]}) == 4
    assert len({block_hash for hashes, _ in [first, *others] for block_hash in hashes}) == 8


# ---- listing


def test_sequences_are_listed_in_pages_oldest_first(stubs: Stubs) -> None:
    peers = [Peer(stubs), Peer(stubs)]
    ids = [peers[i % 2].allocate(range(i + 1)).sequence_id for i in range(7)]
    peers[0].commit(ids[4], 0, 4)
    pages, token = [], ""
    while True:
        request = admin_pb2.ListSequencesRequest(page_size=3, page_token=token)
        reply = stubs.call("ListSequences", request)
        pages.append(list(reply.sequences))
        token = reply.next_page_token
        if not token:
            break
    assert [len(page) for page in pages] == [3, 3, 1]
    listed = [info for page in pages for info in page]
    assert [info.sequence_id for info in listed] == ids
    assert [info.num_tokens for info in listed] == list(range(1, 8))
    assert [info.num_blocks for info in listed] == [1, 1, 1, 1, 2, 2, 2]
    assert [info.num_computed_tokens for info in listed] == [0, 0, 0, 0, 4, 0, 0]
    assert all(info.age_s >= 0 for info in listed)
    digests = [hashlib.sha256(peer.owner).hexdigest() for peer in peers]
    for i, info in enumerate(listed):
        assert len(info.owner_digest) >= 8 and digests[i % 2].startswith(info.owner_digest)


def test_a_page_goes_on_where_the_last_one_ended_whatever_was_freed(stubs: Stubs) -> None:
    peer = Peer(stubs)
    ids = [peer.allocate([i]).sequence_id for i in range(6)]
    first = stubs.call("ListSequences", admin_pb2.ListSequencesRequest(page_size=2))
    assert [info.sequence_id for info in first.sequences] == ids[:2]
    peer.free(ids[0], ids[1], ids[2])
    newest = peer.allocate([9]).sequence_id
    rest = stubs.call(
        "ListSequences", admin_pb2.ListSequencesRequest(page_token=first.next_page_token)
    )
    assert [info.sequence_id for info in rest.sequences] == [*ids[3:], newest]
    assert not rest.next_page_token


def test_the_largest_and_the_newest_come_first_if_asked_for(stubs: Stubs) -> None:
    peer = Peer(stubs)
    lengths = enumerate((1, 9, 5))
    ids = [peer.allocate(range(10 * i, 10 * i + n)).sequence_id for i, n in lengths]
    for order, expected in (
        (admin_pb2.SEQUENCE_ORDER_MOST_BLOCKS, [1, 2, 0]),
        (admin_pb2.SEQUENCE_ORDER_NEWEST, [2, 1, 0]),
    ):
        for page_size in (1, 2, 3, 100):
            request = admin_pb2.ListSequencesRequest(page_size=page_size, order=order)
            reply = stubs.call("ListSequences", request)
            found = [ids.index(info.sequence_id) for info in reply.sequences]
            assert (found, reply.next_page_token) == (expected[:page_size], "")
        request = admin_pb2.ListSequencesRequest(page_token="1", order=order)
        assert stubs.refused("ListSequences", request).field == "page_token"


def test_a_page_has_a_hundred_sequences_unless_asked_otherwise() -> None:
    with running_daemon(CacheOptions(101, 4)) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        for i in range(101):
            peer.allocate([i])
        reply = stubs.call("ListSequences", admin_pb2.ListSequencesRequest())
        assert len(reply.sequences) == 100
        last = admin_pb2.ListSequencesRequest(page_token=reply.next_page_token)
        assert len(stubs.call("ListSequences", last).sequences) == 1
        whole = stubs.call("ListSequences", admin_pb2.ListSequencesRequest(page_size=101))
        assert len(whole.sequences) == 101 and not whole.next_page_token


# ---- modes


def test_without_prefix_caching_nothing_hits_and_the_pool_still_accounts() -> None:
    cache = CacheOptions(7, 4, prefix_caching=False)
    with running_daemon(cache) as running, connected(running.target) as stubs:
        assert not stubs.info().prefix_caching
        peer, tokens = Peer(stubs), list(range(10))
        for _ in range(2):
            reply = peer.allocate(tokens)
            assert (reply.num_cached_tokens, len(reply.block_ids)) == (0, 3)
            assert peer.commit(reply.sequence_id, 0, 10) == cache_pb2.RESULT_CODE_OK
            found = stubs.lookup(tokens, want_hashes=True)
            assert (found.num_cached_tokens, list(found.block_hashes)) == (0, [])
            peer.free(reply.sequence_id)
        held_blocks = [peer.allocate(tokens), peer.allocate(range(100, 116))]
        assert [len(reply.block_ids) for reply in held_blocks] == [3, 4]
        request = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[1])
        assert stubs.refused("Allocate", request).reason == "NO_ROOM"
        stats = stubs.stats()
        assert (stats.queries_tokens, stats.hit_tokens, stats.cached) == (0, 0, 0)
        assert (stats.referenced, stats.requests, stats.evictions) == (7, 4, 0)


def test_a_daemon_without_storage_needs_no_torch() -> None:
    program = """
import sys
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.server.rpc_server import RpcServer
server = RpcServer(Daemon(CacheOptions(16)), max_workers=2)
server.listen("127.0.0.1:0")
server.start()
server.stop(1.0)
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_address_that_cannot_be_bound_is_refused_by_its_name() -> None:
    first = RpcServer(Daemon(CacheOptions(4)), max_workers=1)
    target = first.listen("127.0.0.1:0")
    first.start()
    second = RpcServer(Daemon(CacheOptions(4)), max_workers=1)
    try:
        with pytest.raises(InvalidArgumentError, match=target):
            second.listen(target)
    finally:
        first.stop(1.0)
        second.stop(1.0)
