"""What all tenants share of a daemon, and no tenant can take as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection, reflection_pb2

from prefixcache.core.events import MIN_BUFFER_BYTES
from prefixcache.core.sessions import SessionLimits
from prefixcache.rpc._pb import admin_pb2, cache_pb2, session_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions, Daemon, LimitOptions
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.server.rpc_server import RpcServer
from prefixcache.server.tls import ServerTls, TlsFiles
from tests.support.bearer import bearing, hash_of
from tests.support.certificates import Authority
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.gate import held
from tests.support.stubs import TIMEOUT_S, Peer, Refused, Stubs
from tests.support.waiting import until

PROMPT = list(range(1, 10))
STEP = cache_pb2.StepRequest()
ADMINS = ["admin", "client"]


def rules_of(*names: str, **roles: list[str]) -> Any:
    """Each tenant's token is its name."""
    return parse_auth_rules(
        {
            "identities": [
                {
                    "token_sha256": hash_of(name),
                    "tenant": name,
                    "roles": roles.get(name, ["client"]),
                }
                for name in names
            ]
        }
    )


@dataclass
class Scene:
    running: RunningDaemon
    access: AccessControl
    opened: ExitStack
    _stubs: dict[str, Stubs] = field(default_factory=dict)

    def stubs(self, tenant: str) -> Stubs:
        if tenant not in self._stubs:
            self._stubs[tenant] = self.opened.enter_context(bearing(self.running.target, tenant))
        return self._stubs[tenant]

    def stream(self, tenant: str, name: str, request: Any) -> Any:
        """An open stream that has answered a first request. Raises Refused."""
        stream = self.opened.enter_context(self.stubs(tenant).stream(name))
        self.opened.callback(stream.replies.cancel)
        stream.run(request)
        return stream

    def refuses_stream(self, tenant: str, name: str, request: Any) -> bool:
        try:
            self.stream(tenant, name, request)
        except Refused as refused:
            assert refused.reason == "TOO_MANY_STREAMS"
            assert "kept for other tenants" in refused.message
            return True
        return False


@contextmanager
def served(
    rules: Any,
    limits: LimitOptions | None = None,
    sessions: SessionLimits | None = None,
    **options: Any,
) -> Iterator[Scene]:
    access = AccessControl(rules, PeerTickets())
    cache = CacheOptions(64, 4, event_buffer_bytes=MIN_BUFFER_BYTES)
    with (
        running_daemon(cache, None, limits, sessions, access=access, **options) as running,
        ExitStack() as opened,
    ):
        with running.daemon.sequences.lock:
            running.daemon.sequences.set_tenants(rules.tenants.values())
        yield Scene(running, access, opened)


def test_a_tenant_has_its_share_of_the_step_streams_and_no_more() -> None:
    with served(rules_of("a", "b"), LimitOptions(max_step_streams=5)) as scene:
        for _ in range(3):  # its share, and the one that nobody has a share in
            first = scene.stream("a", "Step", STEP)
        assert scene.refuses_stream("a", "Step", STEP)
        for _ in range(2):
            scene.stream("b", "Step", STEP)
        assert scene.refuses_stream("b", "Step", STEP)
        first.close()
        until(lambda: not scene.refuses_stream("a", "Step", STEP))


def test_the_shares_are_those_of_the_tenants_that_there_are_now() -> None:
    with served(rules_of("a", "b"), LimitOptions(max_step_streams=6)) as scene:
        for _ in range(3):
            first = scene.stream("a", "Step", STEP)
        assert scene.refuses_stream("a", "Step", STEP)
        rules = rules_of("a", "b", "c")
        with scene.running.daemon.sequences.lock:
            scene.running.daemon.sequences.set_tenants(rules.tenants.values())
        scene.access.use(rules)
        scene.stream("b", "Step", STEP)
        assert scene.refuses_stream("b", "Step", STEP), "a has one that c lacks"
        first.close()
        until(lambda: not scene.refuses_stream("b", "Step", STEP))
        for _ in range(2):
            scene.stream("c", "Step", STEP)
        assert all(scene.refuses_stream(tenant, "Step", STEP) for tenant in "abc")


def test_a_tenant_cannot_take_all_keep_alive_streams() -> None:
    with served(rules_of("a", "b"), sessions=SessionLimits(max_sessions=2)) as scene:

        def beat(tenant: str) -> session_pb2.KeepAliveRequest:
            opened = session_pb2.OpenSessionRequest(ttl_s=60, request_id="one")
            session = scene.stubs(tenant).call("OpenSession", opened)
            return session_pb2.KeepAliveRequest(session_id=session.session_id)

        silent = scene.opened.enter_context(scene.stubs("a").stream("KeepAlive"))
        scene.opened.callback(silent.replies.cancel)
        scene.stream("a", "KeepAlive", beat("a"))
        until(lambda: scene.refuses_stream("a", "KeepAlive", beat("a")))
        for _ in range(2):
            scene.stream("b", "KeepAlive", beat("b"))


def test_tenants_with_admins_share_the_streams_of_events() -> None:
    rules = rules_of("a", "ops", "root", ops=ADMINS, root=ADMINS)
    with served(rules) as scene:
        watch = admin_pb2.WatchEventsRequest()
        for _ in range(8):
            scene.stream("ops", "WatchEvents", watch)
        assert scene.refuses_stream("ops", "WatchEvents", watch)
        for _ in range(8):
            scene.stream("root", "WatchEvents", watch)
        with pytest.raises(Refused) as refused:
            scene.stream("a", "WatchEvents", watch)
        assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED


def test_a_tenant_cannot_take_all_reflection_nor_the_watches_of_health() -> None:
    with served(rules_of("a", "b")) as scene:

        def reflect(tenant: str) -> grpc.StatusCode:
            channel = grpc.insecure_channel(scene.running.target)
            scene.opened.callback(channel.close)
            method = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
            stream = channel.stream_stream(
                method,
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            go_on = scene.opened.enter_context(_Endless())
            replies = stream(
                iter(go_on), metadata=[("authorization", f"Bearer {tenant}")], timeout=TIMEOUT_S
            )
            scene.opened.callback(replies.cancel)
            try:
                next(replies)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        codes = [reflect("a") for _ in range(33)]
        assert codes == [grpc.StatusCode.OK] * 32 + [grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert reflect("b") is grpc.StatusCode.OK


class _Endless:
    """One request, and no end of them until the block ends."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __enter__(self) -> _Endless:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def __iter__(self) -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        self._over.wait()


def test_waits_for_pending_blocks_of_one_tenant_leave_places_to_the_others() -> None:
    with served(rules_of("a", "b"), LimitOptions(max_pending_waits=4)) as scene:
        pending = scene.running.daemon.sequences.pending

        def start(tenant: str) -> Any:
            request = cache_pb2.AllocateRequest(
                owner=Peer(scene.stubs(tenant)).owner, token_ids=PROMPT, wait_pending_ms=60_000
            )
            return scene.stubs(tenant).start("Allocate", request)

        for tenant in ("a", "b"):
            Peer(scene.stubs(tenant)).allocate(PROMPT)
        waiting = [start("a") for _ in range(2)]
        until(lambda: pending.num_waiters == 2)
        # Answered without the wait.
        assert scene.stubs("a").finish(start("a")).num_pending_tokens == 8
        waiting += [start("b") for _ in range(2)]
        until(lambda: pending.num_waiters == 4)
        assert scene.stubs("b").finish(start("b")).num_pending_tokens == 8
        for call in waiting:
            call.cancel()


# ---- calls that wait for a thread


@contextmanager
def in_order(daemon: Daemon) -> Iterator[list[int]]:
    """First tokens of the prompts of Lookups, in the order in which they are answered."""
    order: list[int] = []
    prepare = daemon.sequences.prepare

    def note(token_ids: np.ndarray, extra_keys: Any) -> Any:
        order.append(int(token_ids[0]))
        return prepare(token_ids, extra_keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon.sequences, "prepare", note)
        yield order


def lookup(first: int) -> cache_pb2.LookupRequest:
    return cache_pb2.LookupRequest(token_ids=[first, 1])


def test_calls_of_tenants_wait_in_turn_and_each_has_its_places() -> None:
    """Nobody's calls have a share too: two of six."""
    limits = LimitOptions(max_queued_calls=6)
    with (
        served(rules_of("a", "b"), limits, max_workers=1) as scene,
        in_order(scene.running.daemon) as order,
        held(scene.running.daemon.sequences, "prepare") as gate,
    ):
        workers = scene.running.server._workers
        calls = [scene.stubs("a").start("Lookup", lookup(10))]
        gate.wait()
        for number in (11, 12):
            calls.append(scene.stubs("a").start("Lookup", lookup(number)))
            until(lambda: workers.num_waiting == len(calls) - 1)
        refusal = scene.stubs("a").refused("Lookup", lookup(13))
        assert (refusal.reason, refusal.numbers["limit"]) == ("TOO_MANY_CALLS", "6")
        for number in (21, 22):
            calls.append(scene.stubs("b").start("Lookup", lookup(number)))
            until(lambda: workers.num_waiting == len(calls) - 1)
        assert scene.stubs("b").refused("Lookup", lookup(23)).reason == "TOO_MANY_CALLS"
        strangers = [scene.stubs("nobody").start("Lookup", lookup(30)) for _ in range(2)]
        until(lambda: workers.num_waiting == 6)
        gate.release()
        for call in calls:
            assert call.result(TIMEOUT_S).num_blocks_needed == 1
        for call in strangers:
            with pytest.raises(Refused) as refused:
                scene.stubs("nobody").finish(call)
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        assert order == [10, 11, 21, 12, 22]


def test_tenants_that_are_known_by_certificates_wait_in_turn(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server_pair = authority.issue("server", "ip:127.0.0.1")
    pairs = {name: authority.issue(name, f"dns:{name}.local") for name in "ab"}
    rules = parse_auth_rules(
        {"identities": [{"subject": f"dns:{name}.local", "tenant": name} for name in "ab"]}
    )
    daemon = Daemon(CacheOptions(64, 4))
    with daemon.sequences.lock:
        daemon.sequences.set_tenants(rules.tenants.values())
    server = RpcServer(daemon, max_workers=1, access=AccessControl(rules, PeerTickets()))
    tls = ServerTls(TlsFiles(server_pair.cert, server_pair.key, authority.ca))
    address = server.listen("127.0.0.1:0", tls.credentials())
    server.start()
    with (
        ExitStack() as opened,
        in_order(daemon) as order,
        held(daemon.sequences, "prepare") as gate,
    ):
        opened.callback(server.stop, 5.0)
        stubs = {}
        for name, pair in pairs.items():
            credentials = grpc.ssl_channel_credentials(
                authority.ca.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes()
            )
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.secure_channel(address, credentials, options)
            stubs[name] = Stubs(opened.enter_context(channel))
        calls = [stubs["a"].start("Lookup", lookup(10))]
        gate.wait()
        for number in (11, 12, 13, 21):
            calls.append(stubs["ab"[number // 20]].start("Lookup", lookup(number)))
            until(lambda: server._workers.num_waiting == len(calls) - 1)
        gate.release()
        for call in calls:
            assert call.result(TIMEOUT_S).num_blocks_needed == 1
        assert order == [10, 11, 21, 12, 13]
