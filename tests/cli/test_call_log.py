"""What a real daemon's log says of calls: a line for each at debug, with ids, and no secrets."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.client import Client
from prefixcache.core.sessions import owner_digest
from prefixcache.rpc._pb import cache_pb2, session_pb2
from tests.support.collector import attributes_of, collecting
from tests.support.program import MANAGER, Process, logged_until, serving
from tests.support.stubs import Peer, connected

DEBUG = ("--log-level", "debug")
SERVICE = "/prefixcache.v1.PrefixCacheService"
TRACE, SPAN = "ab" * 16, "cd" * 8


def calls_logged(daemon: Process) -> list[dict[str, Any]]:
    """Stops the daemon; its lines of calls, in order."""
    daemon.send_signal(signal.SIGTERM)
    return [line for line in logged_until(daemon, "stopped") if line["event"] == "call"]


def test_each_call_has_one_line_at_debug(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *DEBUG) as daemon:
        with connected(daemon.addresses[0]) as stubs:
            peer = Peer(stubs)
            request = cache_pb2.AllocateRequest(
                owner=peer.owner, token_ids=[123454321], request_id="request one"
            )
            reply = stubs.call("Allocate", request)
            bad = cache_pb2.LookupRequest()
            stubs.refused("Lookup", bad)
        allocate, lookup = calls_logged(daemon)
    assert allocate.pop("duration_s") > 0.0
    assert allocate.pop("queue_s") >= 0.0
    assert allocate.pop("timestamp")
    assert allocate == {
        "level": "debug",
        "event": "call",
        "method": f"{SERVICE}/Allocate",
        "code": "OK",
        "session": owner_digest(peer.owner),
        "request_ids": ["request one"],
        "bytes_in": request.ByteSize(),
        "bytes_out": reply.ByteSize(),
        "peer": "unix:",
    }
    assert (lookup["method"], lookup["code"]) == (f"{SERVICE}/Lookup", "INVALID_ARGUMENT")
    assert (lookup["bytes_in"], lookup["bytes_out"]) == (bad.ByteSize(), 0)
    assert "session" not in lookup and "request_ids" not in lookup
    assert "123454321" not in json.dumps(allocate)


def test_a_session_is_known_by_the_digest_that_operators_see(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *DEBUG) as daemon:
        with Client(daemon.addresses[0], session_ttl_s=60.0) as client:
            client.sequence(range(20)).free()
            (listed,) = client.list_sessions()
        lines = calls_logged(daemon)
    sessions = {line["method"].rpartition("/")[2]: line.get("session") for line in lines}
    for name in ("OpenSession", "KeepAlive", "Allocate", "Free", "CloseSession"):
        assert sessions[name] == listed.owner_digest, name


def test_every_message_of_a_stream_has_its_line(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *DEBUG) as daemon:
        with connected(daemon.addresses[0]) as stubs:
            peer = Peer(stubs)
            allocates = [
                cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[1], request_id=f"r{index}")
                for index in range(40)
            ]
            request = cache_pb2.StepRequest(allocates=allocates)
            with stubs.steps() as steps:
                num_bytes = [steps.run(request).ByteSize() for _ in range(2)]
        lines = calls_logged(daemon)
    assert [line["bytes_out"] for line in lines] == num_bytes
    assert lines[0]["session"] == owner_digest(peer.owner)
    assert lines[0]["request_ids"] == [f"r{index}" for index in range(16)]


def lookup_with(target: str, *metadata: tuple[str, str]) -> None:
    with grpc.insecure_channel(target) as channel:
        request = cache_pb2.LookupRequest(token_ids=range(5)).SerializeToString()
        channel.unary_unary(f"{SERVICE}/Lookup")(request, metadata=metadata, timeout=60)


def test_lines_carry_the_trace_of_the_caller_and_ignore_one_that_is_not_valid(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, *MANAGER, *DEBUG) as daemon:
        for parent in (
            f"00-{TRACE}-{SPAN}-01",
            f"00-{TRACE}-{SPAN}",
            f"00-{TRACE.upper()}-{SPAN}-01",
        ):
            lookup_with(daemon.addresses[0], ("traceparent", parent))
        lookup_with(daemon.addresses[0])
        lines = calls_logged(daemon)
    assert [line["code"] for line in lines] == ["OK"] * 4
    assert [line.get("trace_id") for line in lines] == [TRACE, None, None, None]


def test_with_a_collector_lines_and_spans_have_the_same_ids(tmp_path: Path) -> None:
    with collecting() as collector:
        options = (*MANAGER, *DEBUG, "--otlp-endpoint", collector.endpoint)
        with serving(tmp_path, *options) as daemon:
            lookup_with(daemon.addresses[0], ("traceparent", f"00-{TRACE}-{SPAN}-01"))
            lookup_with(daemon.addresses[0])
            lines = calls_logged(daemon)
        # The last spans are sent before the daemon has stopped.
        spans = collector.named("Lookup")
    assert [(line["trace_id"], line["span_id"]) for line in lines] == [
        (span.trace_id.hex(), span.span_id.hex()) for span in spans
    ]
    assert lines[0]["trace_id"] == TRACE != lines[1]["trace_id"]
    assert spans[0].parent_span_id.hex() == SPAN
    assert attributes_of(spans[0])["rpc.grpc.status_code"] == 0


def test_sighup_turns_the_lines_on_and_off(tmp_path: Path) -> None:
    path = tmp_path / "daemon.toml"
    with serving(tmp_path, *MANAGER, "--config", str(path_with(path, "info"))) as daemon:
        target = daemon.addresses[0]
        lookup_with(target)
        path_with(path, "debug")
        daemon.send_signal(signal.SIGHUP)
        assert not [line for line in logged_until(daemon, "reloaded") if line["event"] == "call"]
        lookup_with(target)
        path_with(path, "info")
        daemon.send_signal(signal.SIGHUP)
        lines = [line for line in logged_until(daemon, "reloaded") if line["event"] == "call"]
        assert len(lines) == 1
        lookup_with(target)
        assert not calls_logged(daemon)


def path_with(path: Path, level: str) -> Path:
    path.write_text(f'log_level = "{level}"')
    return path


def test_what_a_client_sends_cannot_forge_a_line(tmp_path: Path) -> None:
    name = 'x"}\n{"event": "forged"}\x1b[2J'
    with serving(tmp_path, *MANAGER, *DEBUG) as daemon:
        with connected(daemon.addresses[0]) as stubs:
            request = session_pb2.OpenSessionRequest(ttl_s=60.0, request_id=name)
            stubs.call("OpenSession", request)
        (line,) = calls_logged(daemon)
    assert line["request_ids"] == [name]


def test_ids_that_are_refused_as_too_long_do_not_fill_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *DEBUG) as daemon:
        with connected(daemon.addresses[0]) as stubs:
            owner, name = b"x" * 100_000, "y" * 100_000
            request = cache_pb2.AllocateRequest(owner=owner, token_ids=[1], request_id=name)
            stubs.refused("Allocate", request)
        (line,) = calls_logged(daemon)
    assert line["bytes_in"] > 200_000
    assert len(json.dumps(line)) < 1000


def test_under_access_control_a_line_has_the_tenant_and_no_credentials(tmp_path: Path) -> None:
    token = "a-token-of-some-length"
    digest = hashlib.sha256(token.encode()).hexdigest()
    auth = tmp_path / "auth.toml"
    auth.touch(0o600)
    auth.write_text(f'[[identities]]\ntoken_sha256 = "{digest}"\ntenant = "team-a"\n')
    with serving(tmp_path, *MANAGER, *DEBUG, "--auth", str(auth)) as daemon:
        lookup_with(daemon.addresses[0], ("authorization", f"Bearer {token}"))
        with pytest.raises(grpc.RpcError):
            lookup_with(daemon.addresses[0], ("authorization", "Bearer another"))
        known, unknown = calls_logged(daemon)
    assert (known["code"], known["tenant"]) == ("OK", "team-a")
    assert unknown["code"] == "UNAUTHENTICATED"
    assert "tenant" not in unknown
    assert token not in json.dumps(known) and "another" not in json.dumps(unknown)


def test_a_disabled_sdk_leaves_the_callers_trace_out_of_nothing_but_spans(tmp_path: Path) -> None:
    options = (*MANAGER, *DEBUG, "--otlp-endpoint", "http://127.0.0.1:9")
    with serving(tmp_path, *options, environ={"OTEL_SDK_DISABLED": "true"}) as daemon:
        lookup_with(daemon.addresses[0], ("traceparent", f"00-{TRACE}-{SPAN}-01"))
        lookup_with(daemon.addresses[0])
        traced, untraced = calls_logged(daemon)
    assert traced["trace_id"] == TRACE
    assert "trace_id" not in untraced


def test_without_the_extra_an_endpoint_is_refused_as_usage() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None; from prefixcache.cli import main; main()"
    )
    options = (*MANAGER, "--listen", "127.0.0.1:0", "--otlp-endpoint", "http://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--otlp-endpoint" in done.stderr and "prefixcache[tracing]" in done.stderr
    assert "Traceback" not in done.stderr
