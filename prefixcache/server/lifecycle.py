"""A daemon from configuration to exit: build, listen, wait for a signal, drain.

With `configured_daemon` the only part of the server that sees the configuration and the
environment, and the only one that sees signals.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from prefixcache.address import (
    MAX_SOCKET_PATH_BYTES,
    Address,
    UnixAddress,
    check_socket_folder,
    default_listen_address,
)
from prefixcache.config import ServeConfig
from prefixcache.config.operation import EventsSection
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.calls import AccessLog, Observers
from prefixcache.server.configured_daemon import make_daemon
from prefixcache.server.daemon import Daemon
from prefixcache.server.gate import Gate
from prefixcache.server.logs import configure_logs
from prefixcache.server.open_files import raise_limit
from prefixcache.server.overview import Observer
from prefixcache.server.peer_arenas import ArenaRequests
from prefixcache.server.peer_socket import MAX_PEERS, PeerSocket, peer_socket_path
from prefixcache.server.record_file import RecordFile
from prefixcache.server.recorder import Recorder
from prefixcache.server.reload import Reload
from prefixcache.server.rpc_server import RpcServer
from prefixcache.server.service_manager import ServiceManager
from prefixcache.server.signals import Signals, obeyed_signals
from prefixcache.server.sweeper import Sweeper
from prefixcache.server.unix_socket import SocketClaim
from prefixcache.server.watchdog import Watchdog
from prefixcache.types import PoolAccess

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from prefixcache.server.tracing import Tracing
    from prefixcache.server.zmq_publisher import ZmqPublisher

_log = structlog.get_logger(__name__)


def run(config: ServeConfig, read_config: Callable[[], ServeConfig]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second one ends at once.

    SIGHUP calls `read_config`, and puts in force what can be changed. Raises InvalidArgumentError,
    naming the flag, if the daemon cannot be made as configured.
    """
    access_log = AccessLog()
    _prepare_logs(access_log, config)()
    reload = Reload(config, read_config)
    reload.add(partial(_prepare_logs, access_log), "log_format", "log_level")
    manager = ServiceManager.from_environment(os.environ)
    addresses = config.network.addresses or (default_listen_address(os.environ),)
    max_peers = raise_limit(len(addresses) * config.limits.max_connections, MAX_PEERS)
    with obeyed_signals() as signals, ExitStack() as resources:
        recorder = _make_recorder(config)
        if recorder is not None:
            resources.callback(recorder.close)
        tracing = _make_tracing(config.tracing.otlp_endpoint, resources)
        daemon = make_daemon(config, recorder, tracing)
        resources.callback(daemon.close)
        peers = resources.enter_context(closing(PeerSocket(max_peers=max_peers)))
        gate = Gate(config.access, daemon.sequences, peers)
        reload.add(gate.prepare, "auth", "tls_cert", "tls_key", "tls_client_ca")
        server = RpcServer(
            daemon,
            max_workers=config.network.max_workers,
            max_connections_per_peer=config.limits.connections_of_a_peer,
            access=gate.access,
            observers=Observers(access_log, tracing),
        )
        _offer_memory(daemon, PoolAccess[config.access.attach.upper()], gate, peers, addresses)
        bound = [_listen(server, gate, peers, address, resources) for address in addresses]
        observer = Observer(daemon, server.call_counts, lambda: server.is_serving)
        make_registry = partial(_make_registry, daemon, server, recorder)
        metrics = _listen_for_metrics(
            config.metrics.address, make_registry, server, observer, resources
        )
        publisher = _make_publisher(config.events, daemon, resources)
        peers.start()
        _settle_objects()
        if recorder is not None:
            recorder.start()
        server.start()
        sweeper = Sweeper(
            daemon.sequences,
            config.cache.owner_ttl,
            partial(_do_regularly, server, observer),
            lost_writers=daemon.lost_writers,
        )
        sweeper.start()
        resources.callback(sweeper.stop)
        for warning in config.warnings:
            _log.warning(warning)
        _log_start(daemon, bound)
        if metrics is not None:
            _log.info("serving metrics", address=metrics)
        if publisher is not None:
            publisher.start()
            _log.info(
                "publishing events",
                address=publisher.endpoint,
                replay_address=publisher.replay_endpoint,
            )
        watchdog = Watchdog(manager.watchdog_s, server.works_within, manager.beat)
        watchdog.start()
        _wait_for_end(signals, reload, manager, f"serving on {', '.join(bound)}")
        _log.info("stopping", drain_timeout_s=config.process.drain_timeout)
        manager.stopping(config.process.drain_timeout)
        watchdog.stop()
        have_ended = server.stop(config.process.drain_timeout)
    _log.info("stopped", calls_cut=not have_ended)
    if not have_ended:
        # The interpreter would wait for the threads of the calls that were cut.
        os._exit(0)
    return 0


def _do_regularly(server: RpcServer, observer: Observer) -> None:
    server.cut_stale_streams()
    observer.tick()


def _wait_for_end(signals: Signals, reload: Reload, manager: ServiceManager, status: str) -> None:
    """Until a signal says so. status: what the service manager shows meanwhile."""
    manager.ready(status)
    for _ in signals:
        manager.reloading()
        reload.run()
        manager.ready(status)


def _prepare_logs(access_log: AccessLog, config: ServeConfig) -> Callable[[], None]:
    def apply() -> None:
        configure_logs(config.process.log_format, config.process.log_level)
        access_log.is_on = config.process.log_level == "debug"

    return apply


def _make_tracing(endpoint: str | None, resources: ExitStack) -> Tracing | None:
    """Spans to a collector, until the daemon ends, its drain included."""
    if endpoint is None:
        return None
    try:
        from prefixcache.server.tracing import Tracing, make_exporter

        exporter = make_exporter(endpoint, os.environ)
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            "--otlp-endpoint", f"needs {error.name}: pip install 'prefixcache[tracing]'"
        ) from error
    tracing = Tracing(exporter)
    resources.callback(tracing.close)
    return tracing


def _make_recorder(config: ServeConfig) -> Recorder | None:
    record = config.record
    if record.record is None:
        return None
    return Recorder(RecordFile(record.record, record.record_limit), config.pool.block_size)


def _settle_objects() -> None:
    """Take what was imported and made so far out of the cyclic collector's sight.

    With torch these are 200,000 objects, for which a full collection stops all calls: measured on
    a busy core, for 0.4 s. Without them it is 1.5 ms for 4,000 sequences.
    """
    gc.collect()
    gc.freeze()


def _offer_memory(
    daemon: Daemon, limit: PoolAccess, gate: Gate, peers: PeerSocket, addresses: Iterable[Address]
) -> None:
    """Let processes attach to the pool, and bring arenas, where there is a socket to ask on."""
    if any(isinstance(address, UnixAddress) for address in addresses):
        ArenaRequests(daemon.arenas, gate.access).serve(peers)
        attachments = daemon.share_memory(gate.access, limit)
        if attachments is not None:
            attachments.serve(peers)


def _listen(
    server: RpcServer, gate: Gate, peers: PeerSocket, address: Address, resources: ExitStack
) -> str:
    if not isinstance(address, UnixAddress):
        return server.listen(address.target, gate.tcp_credentials)
    claim = _claim(address, "listen", resources)
    if peers.has_handlers:
        _listen_for_peers(gate, peers, peer_socket_path(Path(address.path)), resources)
    bound = server.listen(address.target)
    claim.open_to_group()
    return bound


def _listen_for_peers(gate: Gate, peers: PeerSocket, path: Path, resources: ExitStack) -> None:
    """Only tickets must be had; without the rest, clients send more."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES and not gate.gives_tickets:
        _log.warning("no peer socket, its path is too long: nobody can attach", path=str(path))
        return
    _claim(UnixAddress(str(path)), "listen", resources)
    try:
        peers.listen(path)
    except OSError as error:
        problem = f"no socket can be made at {path}: {error}"
        raise InvalidArgumentError("--listen", problem) from None


def _listen_for_metrics(
    address: Address | None,
    make_registry: Callable[[], CollectorRegistry],
    server: RpcServer,
    observer: Observer,
    resources: ExitStack,
) -> str | None:
    """Serve metrics and a status page until the daemon ends, its drain included; returns where."""
    if address is None:
        return None
    from prefixcache.server.metrics_http import MetricsServer
    from prefixcache.server.status_page import make_pages

    claim = None
    if isinstance(address, UnixAddress):
        claim = _claim(address, "metrics_listen", resources)
    pages = make_pages(observer)
    metrics = MetricsServer(address, make_registry(), lambda: server.is_serving, pages)
    resources.callback(metrics.close)
    if claim is not None:
        claim.open_to_group()
    metrics.start()
    return str(metrics.address)


def _make_registry(
    daemon: Daemon, server: RpcServer, recorder: Recorder | None
) -> CollectorRegistry:
    from prefixcache.server.metrics import make_registry

    return make_registry(daemon, server.call_counts, recorder)


def _make_publisher(
    events: EventsSection, daemon: Daemon, resources: ExitStack
) -> ZmqPublisher | None:
    """Of events over ZeroMQ, until the daemon ends, its drain included."""
    if events.events_zmq is None:
        return None
    try:
        from prefixcache.server.vllm_events import VllmEncoder
        from prefixcache.server.zmq_publisher import ZmqPublisher
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            "--events-zmq", f"needs {error.name}: pip install 'prefixcache[events]'"
        ) from error
    pool = daemon.sequences.pool
    encoder = VllmEncoder(
        block_size=pool.block_size,
        digest_bytes=pool.digest_bytes,
        medium="CPU" if daemon.info.device == "cpu" else "GPU",
    )
    publisher = ZmqPublisher(
        daemon.sequences,
        encoder.encode,
        events.events_zmq,
        events.events_zmq_replay,
        events.events_topic,
    )
    resources.callback(publisher.close)
    return publisher


def _claim(address: UnixAddress, field: str, resources: ExitStack) -> SocketClaim:
    """field: the setting that names the address."""
    try:
        check_socket_folder(address)
    except ValueError as error:
        raise InvalidArgumentError(field, str(error)) from None
    return resources.enter_context(SocketClaim(Path(address.path), field))


def _log_start(daemon: Daemon, addresses: list[str]) -> None:
    info = daemon.info
    _log.info(
        "serving",
        addresses=addresses,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        device=info.device,
        hash_algorithm=info.hash_algorithm,
        hash_seeded=info.hash_seeded,
        pid=os.getpid(),
        boot_id=daemon.boot_id.hex(),
    )
    if not info.hash_seeded:
        _log.info("no --hash-seed: block hashes of this start match no other daemon's")
