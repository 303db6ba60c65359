"""A real daemon on a real socket, in the process of the test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefixcache.server.daemon import CacheOptions, Daemon, LimitOptions, ModelOptions
from prefixcache.server.rpc_server import MAX_STEP_STREAMS, RpcServer


@dataclass(frozen=True)
class RunningDaemon:
    target: str
    daemon: Daemon
    server: RpcServer


@contextmanager
def running_daemon(
    cache: CacheOptions,
    model: ModelOptions | None = None,
    limits: LimitOptions | None = None,
    *,
    max_workers: int = 8,
    max_step_streams: int = MAX_STEP_STREAMS,
) -> Iterator[RunningDaemon]:
    daemon = Daemon(cache, model, limits)
    server = RpcServer(daemon, max_workers=max_workers, max_step_streams=max_step_streams)
    with tempfile.TemporaryDirectory() as folder:
        target = server.listen(f"unix:{Path(folder) / 'prefixcache.sock'}")
        server.start()
        try:
            yield RunningDaemon(target, daemon, server)
        finally:
            server.stop(drain_timeout_s=5.0)
            daemon.close()
