"""Spans of calls, as an OTLP collector gets them over gRPC."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from prefixcache.client import AsyncClient, Client
from prefixcache.core.sessions import owner_digest
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.server.tracing import Tracing, make_exporter
from prefixcache.storage.layout import KVLayout
from prefixcache.types import ExtraKeys
from tests.support.collector import Collector, attributes_of, collecting, collecting_over_http
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import Peer, connected
from tests.support.waiting import until

SERVICE = "prefixcache.v1.PrefixCacheService"
LAYOUT = KVLayout(1, 1, 8, 4, "float32")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    tracing = Tracing(make_exporter(collector.endpoint, {}))
    yield tracing
    tracing.close()


@pytest.fixture
def running(tracing: Tracing) -> Iterator[RunningDaemon]:
    options = CacheOptions(16, block_size=4)
    with running_daemon(options, ModelOptions(LAYOUT), tracing=tracing) as running:
        yield running


def test_a_call_is_a_span_with_the_conventions_of_rpcs(
    running: RunningDaemon, tracing: Tracing, collector: Collector
) -> None:
    with connected(running.target) as stubs:
        peer = Peer(stubs)
        peer.allocate(range(9), request_id="request one")
    tracing.flush()
    (span,) = collector.named("Allocate")
    assert span.name == f"{SERVICE}/Allocate"
    assert span.kind == 2  # server
    assert not span.parent_span_id
    assert span.status.code == 0
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    attributes = attributes_of(span)
    assert attributes.pop("prefixcache.queue_s") >= 0.0
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "Allocate",
        "rpc.grpc.status_code": 0,
        "prefixcache.session": owner_digest(peer.owner),
        "prefixcache.request_ids": ["request one"],
        "prefixcache.queried_tokens": 9,
        "prefixcache.cached_tokens": 0,
    }
    assert collector.resources[0]["service.name"] == "prefixcache"


def test_cached_tokens_are_counted_in_calls_and_steps(
    tracing: Tracing, collector: Collector
) -> None:
    with (
        running_daemon(CacheOptions(16, block_size=4), tracing=tracing) as running,
        connected(running.target) as stubs,
    ):
        peer = Peer(stubs)
        peer.commit(peer.allocate(range(9)).sequence_id, 0, 9)
        stubs.lookup(range(9))
        request = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=range(9))
        with stubs.steps() as steps:
            steps.run(cache_pb2.StepRequest(allocates=[request, request]))
        # The span of a step ends once its answer has left.
        until(lambda: tracing.flush() or collector.named("Step"))
    for name, queried, cached in (("Lookup", 9, 8), ("Step", 18, 16)):
        attributes = attributes_of(collector.named(name)[0])
        assert attributes["prefixcache.queried_tokens"] == queried
        assert attributes["prefixcache.cached_tokens"] == cached
    assert "prefixcache.queried_tokens" not in attributes_of(collector.named("Commit")[0])


@pytest.mark.parametrize(
    ("name", "request_", "code", "is_servers_fault"),
    [
        ("Lookup", cache_pb2.LookupRequest(), 3, False),
        ("Lookup", b"\xff", 3, False),
        ("GetServerInfo", cache_pb2.GetServerInfoRequest(expected_fingerprint=b"x"), 9, False),
    ],
)
def test_a_refused_call_has_its_code(
    running: RunningDaemon,
    tracing: Tracing,
    collector: Collector,
    name: str,
    request_: object,
    code: int,
    is_servers_fault: bool,
) -> None:
    with connected(running.target) as stubs:
        stubs.refused(name, request_)
    tracing.flush()
    (span,) = collector.named(name)
    assert attributes_of(span)["rpc.grpc.status_code"] == code
    assert (span.status.code == 2) == is_servers_fault


def test_a_bug_is_the_servers_fault(
    running: RunningDaemon,
    tracing: Tracing,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(running.daemon.sequences, "prepare", fail)
    with connected(running.target) as stubs, structlog.testing.capture_logs():
        stubs.refused("Lookup", cache_pb2.LookupRequest(token_ids=[1]))
    tracing.flush()
    (span,) = collector.named("Lookup")
    assert attributes_of(span)["rpc.grpc.status_code"] == 13
    assert span.status.code == 2
    assert not span.events


def test_the_clients_span_is_the_parent_over_the_wire(
    running: RunningDaemon, tracing: Tracing, collector: Collector
) -> None:
    application = TracerProvider(shutdown_on_exit=False).get_tracer("application")
    with Client(running.target) as client:
        with application.start_as_current_span("request") as parent:
            client.lookup(range(5))
        client.lookup(range(5))
    tracing.flush()
    traced, untraced = collector.named("Lookup")
    ids = parent.get_span_context()
    assert traced.trace_id == ids.trace_id.to_bytes(16, "big")
    assert traced.parent_span_id == ids.span_id.to_bytes(8, "big")
    assert untraced.trace_id != traced.trace_id
    assert not untraced.parent_span_id


async def lookup_in_a_span(target: str, tracer: trace.Tracer) -> trace.SpanContext:
    async with AsyncClient(target) as client:
        with tracer.start_as_current_span("request") as parent:
            await client.lookup(range(5))
    return parent.get_span_context()


def test_the_async_client_hands_its_span_on_too(
    running: RunningDaemon, tracing: Tracing, collector: Collector
) -> None:
    application = TracerProvider(shutdown_on_exit=False).get_tracer("application")
    ids = asyncio.run(lookup_in_a_span(running.target, application))
    tracing.flush()
    (span,) = collector.named("Lookup")
    assert span.parent_span_id == ids.span_id.to_bytes(8, "big")


def test_a_caller_that_is_not_sampled_gets_no_span(
    running: RunningDaemon, tracing: Tracing, collector: Collector
) -> None:
    request = cache_pb2.LookupRequest(token_ids=range(5))
    with connected(running.target) as stubs:
        for flags in ("00", "01"):
            parent = f"00-{'ab' * 16}-{'cd' * 8}-{flags}"
            stubs.channel.unary_unary(f"/{SERVICE}/Lookup")(
                request.SerializeToString(),
                metadata=[("traceparent", parent), ("tracestate", "a=1")],
            )
    tracing.flush()
    (span,) = collector.named("Lookup")
    assert span.parent_span_id == bytes.fromhex("cd" * 8)
    assert span.trace_state == "a=1"


def test_the_kernels_of_a_prefill_are_a_child(
    running: RunningDaemon, tracing: Tracing, collector: Collector
) -> None:
    tensor = np.ones((5, 1, 8), np.float32)
    with Client(running.target) as client, client.sequence(range(5)) as sequence:
        client.prefill(0, [sequence], [5], tensor, tensor, tensor)
    tracing.flush()
    (call,), (kernels,) = collector.named("Prefill"), collector.named("attention")
    assert kernels.trace_id == call.trace_id
    assert kernels.parent_span_id == call.span_id
    assert call.start_time_unix_nano <= kernels.start_time_unix_nano
    assert kernels.end_time_unix_nano <= call.end_time_unix_nano


def test_spans_hold_no_prompts_and_no_keys_to_sequences(
    running: RunningDaemon, tracing: Tracing, collector: Collector
) -> None:
    keys = ExtraKeys(cache_salt="the salt is a secret")
    with Client(running.target, session_ttl_s=60.0) as client:
        with client.sequence([123454321], extra_keys=keys) as sequence:
            sequence.append([543212345])
        with connected(running.target) as stubs:
            request = cache_pb2.FreeRequest(owner=b"owner is a secret"[:16])
            stubs.call("Free", request)
    tracing.flush()
    (opened,) = collector.named("OpenSession")
    (allocated,) = collector.named("Allocate")
    session = attributes_of(opened)["prefixcache.session"]
    assert attributes_of(allocated)["prefixcache.session"] == session
    sent = b"".join(span.SerializeToString() for span in collector.spans)
    for secret in (b"the salt", b"owner is", b"123454321", b"543212345"):
        assert secret not in sent


def test_a_collector_that_is_gone_delays_no_call_and_is_logged_as_ours() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        with structlog.testing.capture_logs() as log:
            tracing = Tracing(make_exporter(f"http://127.0.0.1:{taken.getsockname()[1]}", {}))
            with (
                running_daemon(CacheOptions(16), tracing=tracing) as running,
                connected(running.target) as stubs,
            ):
                for _ in range(2500):  # more than its queue holds
                    stubs.lookup(range(5))
            tracing.close()
    assert {line["event"] for line in log} <= {"tracing", "the last spans were not taken"}


def test_over_http_spans_come_to_the_path_of_traces() -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with collecting_over_http() as collector:
        # With and without a slash at the end.
        for endpoint in (collector.endpoint, f"{collector.endpoint}/"):
            tracing = Tracing(make_exporter(endpoint, environ))
            with (
                running_daemon(CacheOptions(16), tracing=tracing) as running,
                connected(running.target) as stubs,
            ):
                stubs.lookup(range(5))
            tracing.flush()
            tracing.close()
    assert len(collector.named(f"{SERVICE}/Lookup")) == 2


def test_the_environment_names_the_service(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "another name")
    tracing = Tracing(make_exporter(collector.endpoint, {}))
    with (
        running_daemon(CacheOptions(16), tracing=tracing) as running,
        connected(running.target) as stubs,
    ):
        stubs.lookup(range(5))
    tracing.flush()
    tracing.close()
    assert collector.resources[0]["service.name"] == "another name"


def test_a_protocol_that_is_not_known_is_refused_by_its_variable() -> None:
    with pytest.raises(InvalidArgumentError, match="http/json") as refused:
        make_exporter("http://127.0.0.1:4318", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})
    assert refused.value.field == "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
