"""Who may call: every RPC of the .proto files, with and without credentials."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, cache_pb2, session_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import AuthRules, parse_auth_rules
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.peer_tickets import PeerTickets
from tests.support.bearer import bearing, hash_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import TIMEOUT_S, Refused, Stubs, connected
from tests.support.waiting import until

EXPIRES = "2027-01-01T00:00:00Z"
EXPIRES_S = 1798761600.0
METHODS = list(wire.methods())
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


def identity(token: str, tenant: str = "team", *roles: str, **more: Any) -> dict[str, Any]:
    entry = {"token_sha256": hash_of(token), "tenant": tenant, **more}
    return {**entry, "roles": list(roles)} if roles else entry


def rules_with(*identities: dict[str, Any]) -> AuthRules:
    return parse_auth_rules({"identities": list(identities)})


ROLES = [
    identity("of a client", "team"),
    identity("of an admin", "ops", "admin"),
    identity("of both", "ops", "client", "admin"),
]


@dataclass
class Guarded:
    running: RunningDaemon
    access: AccessControl
    clock_s: list[float] = field(default_factory=lambda: [1000.0])
    opened: ExitStack = field(default_factory=ExitStack)

    def with_token(self, token: str) -> Stubs:
        return self.opened.enter_context(bearing(self.running.target, token))

    def without(self) -> Stubs:
        return self.opened.enter_context(connected(self.running.target))


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    clock_s = [1000.0]
    access = AccessControl(rules_with(*ROLES), PeerTickets(), clock=lambda: clock_s[0])
    with (
        running_daemon(CacheOptions(16, 4, event_buffer_bytes=2**20), access=access) as running,
        ExitStack() as opened,
    ):
        yield Guarded(running, access, clock_s, opened)


def outcome(stubs: Stubs, method: wire.Method) -> grpc.StatusCode:
    """Of an empty request, or of a stream's first message."""
    try:
        if method.is_stream:
            with stubs.stream(method.name) as stream:
                stream.run(method.request())
        else:
            stubs.call(method.name, method.request())
    except Refused as refusal:
        return refusal.code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_rpc_answers_a_caller_without_credentials(guarded: Guarded, method: wire.Method) -> None:
    assert outcome(guarded.without(), method) is UNAUTHENTICATED
    assert outcome(guarded.with_token("of nobody"), method) is UNAUTHENTICATED
    assert outcome(guarded.with_token(""), method) is UNAUTHENTICATED


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_rpc_needs_its_role(guarded: Guarded, method: wire.Method) -> None:
    is_admins = method.service.endswith(".AdminService")
    is_anyones = method.name == "GetServerInfo"
    client = outcome(guarded.with_token("of a client"), method)
    admin = outcome(guarded.with_token("of an admin"), method)
    assert (client is PERMISSION_DENIED) == is_admins
    assert (admin is PERMISSION_DENIED) == (not is_admins and not is_anyones)
    both = outcome(guarded.with_token("of both"), method)
    assert {client, admin, both}.isdisjoint({UNAUTHENTICATED})
    assert both is not PERMISSION_DENIED


def test_a_refusal_says_what_is_missing_and_no_secret(guarded: Guarded) -> None:
    refused = guarded.without().refused("GetServerInfo", cache_pb2.GetServerInfoRequest())
    assert refused.reason == "UNAUTHENTICATED"
    refused = guarded.with_token("of nobody").refused("Lookup", cache_pb2.LookupRequest())
    assert "nobody" not in str(refused)
    assert "nobody" not in str(refused.numbers)
    refused = guarded.with_token("of a client").refused("GetStats", b"")
    assert refused.reason == "PERMISSION_DENIED"
    assert refused.numbers["needed_role"] == "admin"


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "of a client")],
        [("authorization", "Basic of a client")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer of a client"), ("authorization", "Bearer of nobody")],
        [("authorization-bin", b"Bearer of a client")],
    ],
)
def test_only_one_bearer_token_is_a_credential(guarded: Guarded, metadata: Any) -> None:
    with grpc.insecure_channel(guarded.running.target) as channel:
        method = channel.unary_unary("/prefixcache.v1.PrefixCacheService/GetServerInfo")
        with pytest.raises(grpc.RpcError) as refused:
            method(b"", metadata=metadata, timeout=TIMEOUT_S)
        assert refused.value.code() is UNAUTHENTICATED
        assert method(b"", metadata=[("authorization", "bearer of a client")], timeout=TIMEOUT_S)


def test_health_is_open_and_reflection_is_not(guarded: Guarded) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stubs = guarded.without()
    health = health_pb2_grpc.HealthStub(stubs.channel)
    reply = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
    with pytest.raises(grpc.RpcError) as refused:
        next(reflection.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S))
    assert refused.value.code() is UNAUTHENTICATED
    known = reflection_pb2_grpc.ServerReflectionStub(guarded.with_token("of an admin").channel)
    services = next(known.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S))
    assert services.list_services_response.service


def test_an_identity_ends_when_it_expires(guarded: Guarded) -> None:
    entry = identity("for a while")
    entry["expires"] = parse_time(EXPIRES)
    guarded.access.use(rules_with(entry))
    stubs = guarded.with_token("for a while")
    guarded.clock_s[0] = EXPIRES_S - 0.001
    stubs.info()
    guarded.clock_s[0] = EXPIRES_S
    refused = stubs.refused("GetServerInfo", b"")
    assert (refused.code, "expired" in str(refused)) == (UNAUTHENTICATED, True)


def parse_time(text: str) -> Any:
    return tomllib.loads(f"t = {text}")["t"]


def test_new_rules_hold_from_the_next_call_on(guarded: Guarded) -> None:
    stubs = guarded.with_token("of a client")
    stubs.info()
    guarded.access.use(rules_with(identity("another")))
    assert stubs.refused("GetServerInfo", b"").code is UNAUTHENTICATED
    guarded.with_token("another").info()
    guarded.access.use(rules_with(*ROLES))
    stubs.info()


OPEN_SESSION = session_pb2.OpenSessionRequest(ttl_s=60.0)


@pytest.mark.parametrize("name", ["Step", "KeepAlive"])
@pytest.mark.parametrize("way", ["removed", "expired", "another tenant", "another role"])
def test_an_open_stream_ends_with_its_identity(guarded: Guarded, name: str, way: str) -> None:
    guarded.access.use(rules_with(identity("mine", "team", expires=parse_time(EXPIRES))))
    stubs = guarded.with_token("mine")
    session_id = stubs.call("OpenSession", OPEN_SESSION).session_id
    request = session_pb2.KeepAliveRequest(session_id=session_id)
    if name == "Step":
        request = cache_pb2.StepRequest()
    with stubs.stream(name) as open_stream, stubs.stream(name) as waiting:
        open_stream.run(request)
        waiting.run(request)
        if name == "KeepAlive":  # the session's second stream takes the place of the first
            open_stream = waiting
        if way == "expired":
            guarded.clock_s[0] = EXPIRES_S
        else:
            changed = {
                "removed": [],
                "another tenant": [identity("mine", "another")],
                "another role": [identity("mine", "team", "admin")],
            }[way]
            guarded.access.use(rules_with(*changed))
        guarded.running.sweep()
        assert waiting.ended().code is grpc.StatusCode.CANCELLED
        if open_stream is not waiting:
            assert open_stream.ended().code is grpc.StatusCode.CANCELLED


def test_watching_events_ends_with_the_identity_though_nothing_happens(guarded: Guarded) -> None:
    stubs = guarded.with_token("of an admin")
    with stubs.stream("WatchEvents") as stream:
        assert stream.run(admin_pb2.WatchEventsRequest()).events
        guarded.access.use(rules_with(identity("another")))
        guarded.running.sweep()
        assert stream.ended().code is grpc.StatusCode.CANCELLED


def test_a_message_on_a_stream_is_refused_before_the_next_sweep(guarded: Guarded) -> None:
    guarded.access.use(rules_with(identity("mine", expires=parse_time(EXPIRES))))
    with guarded.with_token("mine").steps() as steps:
        steps.run(cache_pb2.StepRequest())
        guarded.clock_s[0] = EXPIRES_S
        steps.send(cache_pb2.StepRequest())
        assert steps.ended().code is UNAUTHENTICATED


def test_a_refused_caller_keeps_no_thread(guarded: Guarded) -> None:
    """Headers without a request: nobody who has no credentials is waited for."""
    silence = SimpleQueue()
    with grpc.insecure_channel(guarded.running.target) as channel:
        method = channel.stream_unary("/prefixcache.v1.PrefixCacheService/Lookup")
        call = method.future(iter(silence.get, None), timeout=TIMEOUT_S)
        until(call.done)
        silence.put(None)
        assert call.code() is UNAUTHENTICATED
