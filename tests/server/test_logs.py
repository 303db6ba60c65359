"""What the daemon writes about a call that failed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.server.logs import configure_logs
from prefixcache.server.rpc_server import RpcServer
from tests.support.stubs import connected

configure_logs(sys.argv[1], "info")
daemon = Daemon(CacheOptions(4, hash_seed="the seed is a secret"))

def prepare(token_ids, extra_keys):
    raise RuntimeError("a bug")

daemon.sequences.prepare = prepare
server = RpcServer(daemon, max_workers=1)
target = server.listen("127.0.0.1:0")
server.start()
keys = cache_pb2.ExtraKeys(cache_salt="the salt is a secret")
with connected(target) as stubs:
    request = cache_pb2.LookupRequest(token_ids=[123454321], extra_keys=keys)
    assert stubs.refused("Lookup", request).reason == "INTERNAL"
server.stop(1.0)
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_bug_is_logged_with_its_traceback_and_without_the_callers_data(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format],
        # gRPC has lines of its own for connections that end late.
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "RuntimeError: a bug" in done.stderr
    assert "/prefixcache.v1.PrefixCacheService/Lookup" in done.stderr
    assert "cache_service.py" in done.stderr
    if log_format == "json":
        assert all(line.startswith('{"timestamp": ') for line in done.stderr.splitlines())
    for secret in ("the salt is a secret", "the seed is a secret", "123454321"):
        assert secret not in done.stderr
