"""What a call may ask for, and how many may: each limit is told, and refuses before it costs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.core.sessions import SessionLimits
from prefixcache.rpc._pb import attention_pb2, cache_pb2
from prefixcache.server import checks, rpc_server
from prefixcache.server.daemon import (
    FIELDS_PER_REQUEST,
    MIN_ROWS_PER_CALL,
    CacheOptions,
    LimitOptions,
    ModelOptions,
)
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.gate import held
from tests.support.raw_peer import RawPeer
from tests.support.stubs import TIMEOUT_S, Peer, Row, Stubs, connected
from tests.support.waiting import until

MAX_TOKENS = 8
OWNER = bytes(16)
LOOKUP = cache_pb2.LookupRequest(token_ids=[1, 2])
MAX_UINT32 = 2**32 - 1


# ---- tokens of a call


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    layout = KVLayout(1, 1, 8, 4, "float32")
    limits = LimitOptions(max_tokens_per_call=MAX_TOKENS)
    with running_daemon(CacheOptions(64, 4), ModelOptions(layout), limits) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs


def prompt(kind: Any, num_tokens: int, num_lookahead_tokens: int = 0) -> Any:
    owner = {"owner": OWNER} if kind is cache_pb2.AllocateRequest else {}
    return kind(token_ids=range(num_tokens), num_lookahead_tokens=num_lookahead_tokens, **owner)


@pytest.mark.parametrize("name", ["Lookup", "Allocate"])
@pytest.mark.parametrize(
    ("num_tokens", "num_lookahead_tokens", "field"),
    [
        (MAX_TOKENS + 1, 0, "token_ids"),
        (1000, 0, "token_ids"),
        (MAX_TOKENS, 1, "num_lookahead_tokens"),
        (1, MAX_TOKENS, "num_lookahead_tokens"),
        (1, MAX_UINT32, "num_lookahead_tokens"),
    ],
)
def test_a_prompt_with_too_many_tokens_is_refused(
    stubs: Stubs, name: str, num_tokens: int, num_lookahead_tokens: int, field: str
) -> None:
    kind = getattr(cache_pb2, f"{name}Request")
    refusal = stubs.refused(name, prompt(kind, num_tokens, num_lookahead_tokens))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.field, refusal.numbers["limit"]) == (field, str(MAX_TOKENS))
    assert stubs.stats().sequences == 0


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_prompt_with_just_as_many_tokens_is_taken(stubs: Stubs, lookahead: int) -> None:
    for name in ("Lookup", "Allocate"):
        kind = getattr(cache_pb2, f"{name}Request")
        stubs.call(name, prompt(kind, MAX_TOKENS - lookahead, lookahead))
    assert stubs.stats().sequences == 1


MANY_ITEMS = cache_pb2.ExtraKeys(
    multimodal_items=[cache_pb2.MultimodalItem()] * (FIELDS_PER_REQUEST + 9)
)


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("Lookup", cache_pb2.LookupRequest(token_ids=[1], extra_keys=MANY_ITEMS)),
        ("Allocate", cache_pb2.AllocateRequest(owner=OWNER, extra_keys=MANY_ITEMS)),
        (
            "Append",
            cache_pb2.AppendRequest(extra_keys=[cache_pb2.AppendExtraKeys(extra_keys=MANY_ITEMS)]),
        ),
        ("Free", cache_pb2.FreeRequest(owner=OWNER, request_ids=["a"] * (FIELDS_PER_REQUEST + 9))),
        ("Fork", cache_pb2.ForkRequest(owner=OWNER, request_ids=["a"] * (FIELDS_PER_REQUEST + 9))),
    ],
)
def test_a_request_of_too_many_fields_is_not_parsed(stubs: Stubs, name: str, request_: Any) -> None:
    """An empty item takes 2 bytes on the wire, and more than 100 in memory."""
    refusal = stubs.refused(name, request_)
    limit = stubs.call("GetServerInfo", cache_pb2.GetServerInfoRequest()).limits
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.field == "request"
    assert refusal.numbers["limit"] == str(limit.max_fields_per_request)
    assert limit.max_fields_per_request == FIELDS_PER_REQUEST + MAX_TOKENS // 4


MANY_IDS = range(1, MIN_ROWS_PER_CALL + 2)
ROWS = {"sequence_ids": MANY_IDS, "start_positions": MANY_IDS, "num_tokens": MANY_IDS}


@pytest.mark.parametrize(
    ("name", "request_", "field"),
    [
        ("Append", cache_pb2.AppendRequest(owner=OWNER, **ROWS), "sequence_ids"),
        ("Commit", cache_pb2.CommitRequest(owner=OWNER, sequence_ids=MANY_IDS), "sequence_ids"),
        ("Free", cache_pb2.FreeRequest(owner=OWNER, sequence_ids=MANY_IDS), "sequence_ids"),
        (
            "Free",
            cache_pb2.FreeRequest(owner=OWNER, sequence_ids=MANY_IDS[1:], request_ids=["a"]),
            "request_ids",
        ),
        (
            "Decode",
            attention_pb2.DecodeRequest(batch=attention_pb2.AttentionBatch(owner=OWNER, **ROWS)),
            "sequence_ids",
        ),
    ],
)
def test_a_batch_of_too_many_rows_is_refused(
    stubs: Stubs, name: str, request_: Any, field: str
) -> None:
    refusal = stubs.refused(name, request_)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.field, refusal.numbers["limit"]) == (field, str(MIN_ROWS_PER_CALL))


def test_a_batch_of_just_as_many_rows_is_taken(stubs: Stubs) -> None:
    freed = stubs.call("Free", cache_pb2.FreeRequest(owner=OWNER, sequence_ids=MANY_IDS[1:]))
    assert len(freed.result_codes) == MIN_ROWS_PER_CALL


def test_too_many_tokens_are_refused_before_anything_is_made_of_them(
    running: RunningDaemon, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(running.daemon.sequences, "prepare", lambda *prompt: made.append(prompt))
    monkeypatch.setattr(checks, "AppendBatch", lambda *columns: made.append(columns))
    for name in ("Lookup", "Allocate"):
        kind = getattr(cache_pb2, f"{name}Request")
        assert stubs.refused(name, prompt(kind, MAX_TOKENS + 1)).field == "token_ids"
    request = Peer(stubs, OWNER).append_request([Row(1, 0, tuple(range(MAX_TOKENS + 1)))])
    assert stubs.refused("Append", request).field == "token_ids"
    assert made == []


@pytest.mark.parametrize(
    ("tokens", "lookahead", "field"),
    [
        ((5, 4), (0, 0), "token_ids"),
        ((4, 4), (0, 1), "num_lookahead_tokens"),
        ((0, 0), (1, MAX_UINT32), "num_lookahead_tokens"),
        ((4, 2), (1, 1), None),
        ((MAX_TOKENS, 0), (0, 0), None),
    ],
)
def test_the_rows_of_an_append_count_together(
    stubs: Stubs, tokens: tuple[int, int], lookahead: tuple[int, int], field: str | None
) -> None:
    peer = Peer(stubs, OWNER)
    ids = [peer.allocate([1, 2, 3]).sequence_id for _ in range(2)]
    rows = [
        Row(sequence_id, 3, tuple(range(count)), num_lookahead_tokens=ahead)
        for sequence_id, count, ahead in zip(ids, tokens, lookahead, strict=True)
    ]
    if field is None:
        assert [row.code for row in peer.append_rows(rows)] == [cache_pb2.RESULT_CODE_OK] * 2
        return
    before = stubs.stats()
    refusal = stubs.refused("Append", peer.append_request(rows))
    assert (refusal.field, refusal.numbers["limit"]) == (field, str(MAX_TOKENS))
    assert stubs.stats().blank == before.blank


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_the_rows_of_an_attention_call_count_together(stubs: Stubs, name: str) -> None:
    batch = attention_pb2.AttentionBatch(
        owner=OWNER, sequence_ids=[1, 2], start_positions=[0, 0], num_tokens=[1, MAX_TOKENS]
    )
    request = getattr(attention_pb2, f"{name}Request")(batch=batch)
    refusal = stubs.refused(name, request)
    assert (refusal.field, refusal.numbers["limit"]) == ("num_tokens", str(MAX_TOKENS))
    batch.num_tokens[1] -= 1
    request = getattr(attention_pb2, f"{name}Request")(batch=batch)
    assert stubs.refused(name, request).field == "q.data_type"  # the next thing that is wrong


def test_a_call_in_a_step_has_the_limit_of_a_call(stubs: Stubs) -> None:
    fits, too_large = (prompt(cache_pb2.AllocateRequest, MAX_TOKENS + extra) for extra in (0, 1))
    with stubs.steps() as steps:
        reply = steps.run(cache_pb2.StepRequest(allocates=[fits, too_large, fits]))
    assert [(error.call, error.index) for error in reply.errors] == [("allocates", 1)]
    assert stubs.stats().sequences == 2


# ---- calls at the same time


@pytest.mark.parametrize("max_queued_calls", [0, 1, 3])
def test_calls_beyond_the_queue_are_refused_at_once(max_queued_calls: int) -> None:
    limits = LimitOptions(max_queued_calls=max_queued_calls)
    with (
        running_daemon(CacheOptions(16, 4), None, limits, max_workers=1) as running,
        connected(running.target) as stubs,
    ):
        with held(running.daemon.sequences, "prepare") as gate:
            calls = [stubs.start("Lookup", LOOKUP)]
            gate.wait()
            calls += [stubs.start("Lookup", LOOKUP) for _ in range(max_queued_calls)]
            until(lambda: running.server._workers.num_waiting == max_queued_calls)
            for _ in range(3):
                refusal = stubs.refused("Lookup", LOOKUP)
                assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert (refusal.reason, refusal.retry_delay_s) == ("TOO_MANY_CALLS", 0.1)
                assert refusal.numbers["limit"] == str(max_queued_calls)
            # A daemon that is busy is well all the same.
            health = health_pb2_grpc.HealthStub(stubs.channel)
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            assert stubs.finish(call).num_blocks_needed == 1
        assert stubs.lookup([1, 2]).num_blocks_needed == 1


def test_a_call_without_a_deadline_does_not_wait_for_ever() -> None:
    now_s, limits = [0.0], LimitOptions(max_queue_wait_s=2.5)
    with (
        running_daemon(
            CacheOptions(16, 4), None, limits, max_workers=1, clock=lambda: now_s[0]
        ) as running,
        connected(running.target) as stubs,
    ):
        lookup = stubs.channel.unary_unary(
            "/prefixcache.v1.PrefixCacheService/Lookup",
            request_serializer=cache_pb2.LookupRequest.SerializeToString,
        )
        with held(running.daemon.sequences, "prepare") as gate:
            first = stubs.start("Lookup", LOOKUP)
            gate.wait()
            early = lookup.future(LOOKUP)
            until(lambda: running.server._workers.num_waiting == 1)
            now_s[0] = 2.0
            late = stubs.start("Lookup", LOOKUP)
            until(lambda: running.server._workers.num_waiting == 2)
            running.sweep()
            assert running.server._workers.num_waiting == 2
            now_s[0] = 2.5
            running.sweep()
            error = early.exception(timeout=TIMEOUT_S)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2.5 s" in error.details()
            assert running.server._workers.num_waiting == 1
        assert stubs.finish(first).num_blocks_needed == 1
        assert stubs.finish(late).num_blocks_needed == 1


def test_connections_beyond_the_limit_are_closed_and_the_others_served() -> None:
    limits = LimitOptions(max_connections=2)
    with running_daemon(CacheOptions(16, 4), None, limits) as running:
        with connected(running.target) as first, RawPeer(running.target) as second:
            assert first.info().limits.max_connections == 2
            second.settings()
            with pytest.raises(OSError), RawPeer(running.target) as third:
                third.settings()
            assert first.lookup([1, 2]).num_blocks_needed == 1
        until(lambda: is_served(running.target))


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_a_connection_that_never_comes_about_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(rpc_server, "HANDSHAKE_TIMEOUT_MS", 200)
    with running_daemon(CacheOptions(16, 4), None, LimitOptions(max_connections=1)) as running:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.settimeout(TIMEOUT_S)
            silent.connect(running.target.removeprefix("unix:"))
            silent.sendall(sent)
            while silent.recv(1024):
                pass
        until(lambda: is_served(running.target))


def is_served(target: str) -> bool:
    try:
        with RawPeer(target) as peer:
            peer.settings()
    except OSError:
        return False
    return True


# ---- clients without a session


def test_owners_without_a_session_are_limited_and_so_are_their_sequences() -> None:
    limits = SessionLimits(max_owners=2, max_sequences=3)
    with (
        running_daemon(CacheOptions(64, 4), session_limits=limits) as running,
        connected(running.target) as stubs,
    ):
        first, second, third = (Peer(stubs) for _ in range(3))
        ids = [first.allocate([1]).sequence_id for _ in range(3)]
        refusal = stubs.refused("Allocate", allocate(first))
        assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_SEQUENCES", "3")
        second.allocate([1])
        refusal = stubs.refused("Allocate", allocate(third))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_OWNERS", "2")
        second.allocate([1])
        first.free(*ids)
        third.allocate([1])
        assert stubs.stats().sequences == 3


def allocate(peer: Peer) -> cache_pb2.AllocateRequest:
    return cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[1])


def test_the_daemon_tells_its_limits() -> None:
    limits = LimitOptions(
        max_tokens_per_call=101,
        max_queued_calls=102,
        max_queue_wait_s=103.5,
        max_connections=104,
        max_step_streams=105,
    )
    with (
        running_daemon(CacheOptions(16, 4), None, limits, SessionLimits(max_owners=106)) as running,
        connected(running.target) as stubs,
    ):
        told = stubs.info().limits
    assert (told.max_tokens_per_call, told.max_queued_calls) == (101, 102)
    assert (told.max_queue_wait_s, told.max_connections) == (103.5, 104)
    assert (told.max_step_streams, told.max_owners) == (105, 106)
