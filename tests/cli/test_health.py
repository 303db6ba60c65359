"""`prefixcache health`, which containers run to see whether they are well."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixcache.cli import main
from tests.support.program import MANAGER, serving


def exit_code(target: str, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["health", "--target", target, *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_daemon_that_serves_is_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, *MANAGER) as process:
        assert exit_code(process.addresses[0]) == 0
    assert capsys.readouterr().out == "SERVING\n"


def test_no_token_is_needed_under_access_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = tmp_path / "auth.toml"
    auth.write_text(f'[[identities]]\ntoken_sha256 = "{"0" * 64}"\ntenant = "one"\n')
    auth.chmod(0o600)
    monkeypatch.delenv("PREFIXCACHE_TOKEN", raising=False)
    with serving(tmp_path, *MANAGER, "--auth", str(auth)) as process:
        assert exit_code(process.addresses[0]) == 0


def test_a_daemon_that_drains_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with ThreadPoolExecutor(1) as workers:
        server = grpc.server(workers)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        target = f"unix:{tmp_path}/d.sock"
        server.add_insecure_port(target)
        server.start()
        assert exit_code(target) == 1
        server.stop(None).wait()
    assert capsys.readouterr().out == "NOT_SERVING\n"


def test_neither_is_one_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(f"unix:{tmp_path}/d.sock", "--timeout", "60") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"no daemon can be reached at unix:{tmp_path}/d.sock" in shown.err
