"""What every RPC tells a tenant is the same with and without another tenant's clients at work.

Ids and numbers of blocks are random or the pool's, and left aside. Each tenant has half of the pool
guaranteed, so that what is free for it is its own business too; where it may borrow, the rest of
the pool shows in what it can have, and must.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from prefixcache.core.events import MIN_BUFFER_BYTES
from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2, session_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.storage.layout import KVLayout
from tests.support.bearer import bearing, hash_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import STREAMS, PartRefused, Peer, Refused, Row, Stubs, refusals
from tests.support.waiting import until

SIZE, NUM_BLOCKS = 4, 64
OPTIONS = CacheOptions(
    NUM_BLOCKS, SIZE, hash_seed="a seed of the tenants' views", event_buffer_bytes=MIN_BUFFER_BYTES
)
LAYOUT = KVLayout(1, 1, 8, SIZE, "float32")
CACHED, PENDING = list(range(1, 10)), list(range(101, 114))
RULES = {
    "identities": [{"token_sha256": hash_of(name), "tenant": name} for name in ("own", "other")],
    "tenants": {name: {"guaranteed_blocks": NUM_BLOCKS // 2} for name in ("own", "other")},
}
TELLS_OF_ONES_OWN = {
    "GetServerInfo",
    "Lookup",
    "Allocate",
    "Append",
    "Commit",
    "Fork",
    "Truncate",
    "Free",
    "Step",
    "OpenSession",
    "KeepAlive",
    "CloseSession",
    "Prefill",
    "Decode",
}
TELLS_ADMINS_OF_ALL = {
    "Explain",
    "GetStats",
    "ResetCache",
    "ListSequences",
    "ListSessions",
    "WatchEvents",
}
_NOT_COMPARED = re.compile(
    r"(boot|sequence|session)_id|(new_|dropped_)?block_ids|copy_(sources|destinations)|"
    r"sequence_ids|holder_\d_digest"
)
_RANDOM = re.compile(r"[0-9a-f]{16,}|\d{15,}")


def test_it_is_known_of_every_rpc_whom_it_tells_what() -> None:
    assert not TELLS_OF_ONES_OWN & TELLS_ADMINS_OF_ALL
    assert {method.name for method in wire.methods()} == TELLS_OF_ONES_OWN | TELLS_ADMINS_OF_ALL


# ---- the two tenants


@contextmanager
def daemon_of_two(has_storage: bool) -> Iterator[RunningDaemon]:
    rules = parse_auth_rules(RULES)
    access = AccessControl(rules, PeerTickets())
    model = ModelOptions(LAYOUT) if has_storage else None
    with running_daemon(OPTIONS, model, access=access) as running:
        with running.daemon.sequences.lock:
            running.daemon.sequences.set_tenants(rules.tenants.values())
        yield running


def tensor(count: int) -> attention_pb2.Tensor:
    return attention_pb2.Tensor(
        data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=[count, 1, 8], data=bytes(count * 32)
    )


def attention(kind: type[Any], peer: Peer, sequence_id: int, start: int, count: int) -> Any:
    batch, data = peer.batch(0, [(sequence_id, start, count)]), tensor(count)
    return kind(batch=batch, q=data, k=data, v=data)


def computed(peer: Peer, prompt: list[int], has_storage: bool, **fields: Any) -> int:
    """A sequence whose K/V are complete."""
    made = peer.allocate(prompt, **fields)
    sequence_id, first = made.sequence_id, made.num_cached_tokens
    if has_storage:
        request = attention(
            attention_pb2.PrefillRequest, peer, sequence_id, first, len(prompt) - first
        )
        peer.stubs.call("Prefill", request)
    else:
        peer.commit(sequence_id, first, len(prompt) - first)
    return sequence_id


@contextmanager
def at_work(running: RunningDaemon, has_storage: bool) -> Iterator[None]:
    """The other tenant: the same prompts cached, computed and waited for, its half full."""
    with bearing(running.target, "other") as stubs, ExitStack() as opened:
        session = stubs.call(
            "OpenSession", session_pb2.OpenSessionRequest(ttl_s=60, client_name="of the other")
        )
        peer = Peer(stubs, session.session_id)
        alive = opened.enter_context(stubs.stream("KeepAlive"))
        alive.run(session_pb2.KeepAliveRequest(session_id=peer.owner))
        opened.enter_context(stubs.steps()).run(cache_pb2.StepRequest())
        for prompt in (CACHED, list(range(1000, 1120)), list(range(2000, 2120))):  # it evicts
            peer.free(computed(peer, prompt, has_storage))
        held = computed(peer, CACHED, has_storage, request_id="r")
        peer.fork(held, len(CACHED), ["child"])
        peer.allocate(PENDING)
        waiting = stubs.start(
            "Allocate",
            cache_pb2.AllocateRequest(
                owner=peer.owner, token_ids=PENDING, wait_pending_ms=60_000, request_id="w"
            ),
        )
        until(lambda: running.daemon.sequences.pending.num_waiters == 1)
        with pytest.raises(Refused):  # and is told so
            peer.allocate(range(3000, 3000 + SIZE * 30))
        yield
        waiting.cancel()


# ---- what a tenant sees


def seen(what: Callable[[], Any]) -> Any:
    try:
        reply = what()
    except PartRefused as refused:
        numbers = {key: _masked(key, value) for key, value in refused.numbers.items()}
        message = _RANDOM.sub("#", refused.message)
        return refused.code.name, message, numbers, refused.retry_delay_s
    return _view(reply)


def _view(message: Any) -> dict[str, Any]:
    fields = MessageToDict(message, preserving_proto_field_name=True)
    parts = {
        f"{name}[{index}]": seen(_raising(refused))
        for (name, index), refused in (
            refusals(message) if isinstance(message, cache_pb2.StepResponse) else {}
        ).items()
    }
    fields.pop("errors", None)
    return {key: _masked(key, value) for key, value in fields.items()} | parts


def _raising(refused: PartRefused) -> Callable[[], Any]:
    def fail() -> None:
        raise refused

    return fail


def _masked(key: str, value: Any) -> Any:
    """What is not compared counts as present, lists by their length."""
    if isinstance(value, dict):
        return {name: _masked(name, part) for name, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_masked(key, part) for part in value]
    if _NOT_COMPARED.fullmatch(key):
        return len(value) if isinstance(value, list) else "#"
    return value


def views(stubs: Stubs, strangers_id: int, has_storage: bool) -> dict[str, list[Any]]:
    """Of each RPC what its answers are, those of refusals too. strangers_id: of a sequence."""
    found: dict[str, list[Any]] = {method.name: [] for method in wire.methods()}

    def ask(name: str, request: Any) -> Any:
        reply: list[Any] = []

        def call() -> Any:
            if name in STREAMS:
                with stubs.stream(name) as stream:
                    reply.append(stream.run(request))
            else:
                reply.append(stubs.call(name, request))
            return reply[0]

        found[name].append(seen(call))
        return reply[0] if reply else None

    ask("GetServerInfo", cache_pb2.GetServerInfoRequest())
    opened = ask("OpenSession", session_pb2.OpenSessionRequest(ttl_s=60, request_id="r"))
    peer = Peer(stubs, opened.session_id)
    ask("KeepAlive", session_pb2.KeepAliveRequest(session_id=peer.owner))
    ids = []
    for prompt in (CACHED, CACHED, PENDING, list(range(4000, 4000 + 4 * SIZE))):
        ask("Lookup", cache_pb2.LookupRequest(token_ids=prompt, want_hashes=True))
        request = cache_pb2.AllocateRequest(
            owner=peer.owner, token_ids=prompt, wait_pending_ms=60_000, request_id=f"r{len(ids)}"
        )
        made = ask("Allocate", request)
        ids.append(made.sequence_id)
        first = made.num_cached_tokens
        request = attention(attention_pb2.PrefillRequest, peer, ids[-1], first, len(prompt) - first)
        ask("Prefill", request)
        ask("Commit", peer.commit_request([(ids[-1], first, len(prompt) - first)]))
        ask("Append", peer.append_request([Row(ids[-1], len(prompt), (7, 8))]))
        ask("Decode", attention(attention_pb2.DecodeRequest, peer, ids[-1], len(prompt), 2))
        ask("Commit", peer.commit_request([(ids[-1], len(prompt), 2)]))
    ask("Truncate", _truncate(peer, ids[0], len(CACHED) + 2, 5))
    ask("Fork", _fork(peer, ids[1], len(CACHED) + 2))
    for sequence_id in (strangers_id, 1):
        ask("Append", peer.append_request([Row(sequence_id, 9, (1,))]))
        ask("Commit", peer.commit_request([(sequence_id, 9, 1)]))
        ask("Fork", _fork(peer, sequence_id, 9))
        ask("Truncate", _truncate(peer, sequence_id, 9, 1))
        ask("Free", cache_pb2.FreeRequest(owner=peer.owner, sequence_ids=[sequence_id]))
        ask("Prefill", attention(attention_pb2.PrefillRequest, peer, sequence_id, 9, 1))
        ask("Decode", attention(attention_pb2.DecodeRequest, peer, sequence_id, 9, 1))
    for num_blocks in (NUM_BLOCKS // 2 - 8, NUM_BLOCKS // 2 + 1, NUM_BLOCKS + 1):  # of no room
        prompt = range(5000, 5000 + SIZE * num_blocks)
        ask("Lookup", cache_pb2.LookupRequest(token_ids=prompt))
        ask("Allocate", cache_pb2.AllocateRequest(owner=peer.owner, token_ids=prompt))
        allocate = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=prompt)
        ask("Step", cache_pb2.StepRequest(allocates=[allocate]))
    grown = Row(ids[3], 4 * SIZE + 2, tuple(range(SIZE * 24)))
    ask("Append", peer.append_request([grown]))
    ask("Free", cache_pb2.FreeRequest(owner=peer.owner, sequence_ids=ids))
    ask("CloseSession", session_pb2.CloseSessionRequest(session_id=peer.owner))
    for name in TELLS_ADMINS_OF_ALL:
        ask(name, getattr(admin_pb2, f"{name}Request")())
    return found


def _truncate(peer: Peer, sequence_id: int, before: int, after: int) -> cache_pb2.TruncateRequest:
    return cache_pb2.TruncateRequest(
        owner=peer.owner,
        sequence_id=sequence_id,
        num_tokens_before=before,
        num_tokens_after=after,
    )


def _fork(peer: Peer, sequence_id: int, num_tokens: int) -> cache_pb2.ForkRequest:
    return cache_pb2.ForkRequest(
        owner=peer.owner, sequence_id=sequence_id, num_tokens=num_tokens, request_ids=["c"]
    )


@pytest.mark.parametrize("has_storage", [False, True])
def test_a_tenant_is_told_the_same_with_and_without_another_at_work(has_storage: bool) -> None:
    with daemon_of_two(has_storage) as running, bearing(running.target, "own") as stubs:
        alone = views(stubs, 2, has_storage)
    with (
        daemon_of_two(has_storage) as running,
        at_work(running, has_storage),
        bearing(running.target, "own") as stubs,
    ):
        strangers_id = next(iter(running.daemon.sequences.live.by_id))
        beside = views(stubs, strangers_id, has_storage)
    for name in TELLS_OF_ONES_OWN:
        assert alone[name], f"{name} was not asked"
        assert beside[name] == alone[name], name
    for name in TELLS_ADMINS_OF_ALL:
        ((code, *_),) = beside[name]
        assert code == grpc.StatusCode.PERMISSION_DENIED.name, name
        assert beside[name] == alone[name], name
    reasons = {view[0] for view in beside["Allocate"] if isinstance(view, tuple)}
    assert reasons == {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"}


def test_that_test_would_notice_what_all_are_told_together() -> None:
    """Where there are no tenants, a refusal says what all others hold."""
    with running_daemon(OPTIONS) as running, ExitStack() as opened:
        stubs = opened.enter_context(bearing(running.target, "anybody"))
        prompt = range(SIZE * (NUM_BLOCKS - 1))

        def refusal() -> Any:
            return seen(lambda: Peer(stubs).allocate(prompt))

        Peer(stubs).allocate(range(7000, 7000 + 2 * SIZE))
        first = refusal()
        Peer(stubs).allocate(range(8000, 8000 + 2 * SIZE))
        assert refusal() != first
