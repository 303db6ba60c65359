"""A real daemon on a real socket, in the process of the test."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefixcache.core.sequence import Prompt
from prefixcache.core.sessions import SessionLimits
from prefixcache.server.access import Access, OpenAccess
from prefixcache.server.calls import Observers
from prefixcache.server.daemon import CacheOptions, Daemon, LimitOptions, ModelOptions
from prefixcache.server.peer_socket import PeerSocket, peer_socket_path
from prefixcache.server.rpc_server import RpcServer
from prefixcache.server.sweeper import Sweeper
from prefixcache.types import CacheUse, PoolAccess

if TYPE_CHECKING:
    from prefixcache.server.tracing import Tracing
    from tests.support.arrivals import Arrivals


@dataclass(frozen=True)
class RunningDaemon:
    target: str
    daemon: Daemon
    server: RpcServer

    def sweep(self) -> None:
        """What the daemon does four times a second."""
        sweeper(self).sweep()


def sweeper(running: RunningDaemon) -> Sweeper:
    daemon, server = running.daemon, running.server
    return Sweeper(daemon.sequences, 600.0, server.cut_stale_streams, clock=daemon.clock)


@contextmanager
def running_daemon(
    cache: CacheOptions,
    model: ModelOptions | None = None,
    limits: LimitOptions | None = None,
    session_limits: SessionLimits | None = None,
    *,
    max_workers: int = 8,
    max_connections_per_peer: int | None = None,
    access: Access | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_allocated: Callable[[Prompt, CacheUse, bool], None] | None = None,
    tracing: Tracing | Arrivals | None = None,
    attach: PoolAccess = PoolAccess.NONE,
) -> Iterator[RunningDaemon]:
    """Nothing sweeps it but `RunningDaemon.sweep`. attach: what anybody may do with its memory."""
    daemon = Daemon(
        cache,
        model,
        limits,
        session_limits,
        clock=clock,
        on_allocated=on_allocated,
        around_kernels=nullcontext if tracing is None else tracing.attention,
    )
    observers = Observers(spans=tracing)
    server = RpcServer(
        daemon,
        max_workers=max_workers,
        max_connections_per_peer=max_connections_per_peer,
        access=access,
        observers=observers,
    )
    with tempfile.TemporaryDirectory() as folder, closing(PeerSocket()) as peers:
        path = Path(folder) / "prefixcache.sock"
        attachments = daemon.share_memory(access or OpenAccess(), attach)
        if attachments is not None:
            attachments.serve(peers)
            peers.listen(peer_socket_path(path))
        peers.start()
        target = server.listen(f"unix:{path}")
        server.start()
        try:
            yield RunningDaemon(target, daemon, server)
        finally:
            server.stop(drain_timeout_s=5.0)
            daemon.close()
