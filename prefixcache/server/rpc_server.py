"""The gRPC server of a daemon: services, health, reflection, limits and addresses.

Stock synchronous gRPC with a pool of worker threads: measured, it equals or beats the asyncio
server at every load tried, and handlers may block in numpy and torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from prefixcache.errors import InvalidArgumentError, PrefixCacheError
from prefixcache.rpc import wire
from prefixcache.rpc.status import to_status
from prefixcache.server.access import Access, OpenAccess
from prefixcache.server.admin_service import AdminService
from prefixcache.server.arrivals import Arrivals
from prefixcache.server.attention_service import AttentionService
from prefixcache.server.cache_service import CacheService
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.calls import Observers
from prefixcache.server.crowded_addresses import CrowdedAddresses
from prefixcache.server.daemon import MAX_STREAMS_PER_CONNECTION, Daemon
from prefixcache.server.event_streams import MAX_EVENT_STREAMS, EventStreams
from prefixcache.server.handlers import Service, Transfers, add_services, run_in
from prefixcache.server.health_service import HealthService
from prefixcache.server.incoming_calls import tenant_of_calls
from prefixcache.server.keep_alive import KeepAliveStreams
from prefixcache.server.pending_waits import PendingWaits
from prefixcache.server.places import Places
from prefixcache.server.replies import Replies
from prefixcache.server.session_service import SessionService
from prefixcache.server.streams import Streams
from prefixcache.server.stuck_connections import StuckConnections
from prefixcache.server.workers import Workers, WorkQueueLimits

MIN_PING_INTERVAL_MS = 5_000
"""Clients may ping this often, with or without calls, before they are told to go away."""
_MAX_WATCHES = 64
"""Health watches that are served at the same time, and reflection streams; more are refused."""
_STREAMS_A_SESSION = 2
"""KeepAlive streams: the daemon may not know yet that the one before has broken."""
HANDSHAKE_TIMEOUT_MS = 5_000
"""A connection that has not come about by then, TLS included, leaves its place to others."""
_UNREAD_MESSAGES = 4
_MIN_UNREAD_BYTES = 64 * 2**20
"""So many of the largest messages, or so many bytes, may wait for their callers to read them."""
_LAST_REPLIES_S = 0.5
"""How long replies may take to leave once their calls have ended."""


def make_server(workers: Workers, max_message_bytes: int, max_connections: int) -> grpc.Server:
    """A server without services yet.

    max_message_bytes: of one message, either way. max_connections: to one address.
    """
    return grpc.server(
        workers,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
            # Two daemons on one port would split its calls between two pools.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ],
    )


class RpcServer:
    """Serves one daemon on any number of addresses.

    max_workers: calls that run at the same time, and as many Prefill and Decode calls; more of
    them wait, within limits. Attention has threads of its own, so that a long one delays no lookup
    and no health check, and so have streams: one that its client forgot takes none from the calls.
    max_connections_per_peer: to one address; by default one peer may have all.
    access: says who calls; by default anyone may do anything. observers: are told of each call.
    `call_counts` are by the RPC's name; `is_serving` is true from `start` to `stop`.
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        max_workers: int,
        max_connections_per_peer: int | None = None,
        access: Access | None = None,
        observers: Observers | None = None,
    ) -> None:
        self._access = access or OpenAccess()
        self._daemon = daemon
        self._num_ended = 0
        limits = daemon.info.limits
        tenants = self._access.tenants
        make_workers = partial(
            Workers,
            max_workers,
            limits=WorkQueueLimits(limits.max_queued_calls, limits.max_queue_wait_s),
            tenants=tenants,
            tenant_of=tenant_of_calls(self._access),
            clock=daemon.clock,
        )
        self._workers, self._attention_workers = make_workers("rpc"), make_workers("attention")
        self._watches = Streams(_MAX_WATCHES, "watch")
        self._reflections = Streams(_MAX_WATCHES, "reflection", tenants)
        self._step_streams = Streams(limits.max_step_streams, "step", tenants)
        self._waits = PendingWaits(
            daemon.sequences, self._workers.lent_place, Places(limits.max_pending_waits, tenants)
        )
        self._arrivals = Arrivals(daemon.clock)
        self.call_counts = {method.name: CallCounts() for method in wire.methods()}
        self.is_serving = False
        max_unread_bytes = max(_UNREAD_MESSAGES * limits.max_message_bytes, _MIN_UNREAD_BYTES)
        self._replies = Replies(max_unread_bytes, daemon.clock)
        self._stuck = StuckConnections(daemon.clock)
        self._crowded = CrowdedAddresses(max_connections_per_peer or limits.max_connections)
        max_keep_alives = _STREAMS_A_SESSION * limits.max_sessions
        self._keep_alives = KeepAliveStreams(daemon.sequences, daemon.boot_id, daemon.clock)
        self._event_streams = EventStreams(daemon.sequences, daemon.boot_id)
        self._health = HealthService(self._workers, self._watches, self._arrivals, daemon.boot_id)
        self._server = make_server(self._workers, limits.max_message_bytes, limits.max_connections)
        add_services(
            self._server,
            {
                "PrefixCacheService": Service(CacheService(daemon, self._waits), self._workers),
                "SessionService": Service(SessionService(daemon, self._keep_alives), self._workers),
                "AttentionService": Service(AttentionService(daemon), self._attention_workers),
                "AdminService": Service(
                    AdminService(daemon, self.call_counts, self._event_streams, self._access),
                    self._workers,
                ),
            },
            {
                "Step": self._step_streams,
                "KeepAlive": Streams(max_keep_alives, "keep-alive", tenants),
                "WatchEvents": Streams(
                    MAX_EVENT_STREAMS, "events", self._access.tenants_with_admins
                ),
            },
            Transfers(self._arrivals, self._replies),
            self._access,
            self.call_counts,
            observers or Observers(),
            daemon.boot_id,
            limits.max_fields_per_request,
        )
        self._health.add_to(self._server)
        self._add_reflection()

    def listen(self, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Add `unix:/path` or `host:port`; returns it, with the port that was bound.

        credentials: of TLS. Raises InvalidArgumentError if it cannot be bound.
        """
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InvalidArgumentError(
                "listen", f"cannot listen on {address}: taken, or no address of this host"
            ) from error
        bound = address
        if not address.startswith("unix:"):
            bound = f"{address.rpartition(':')[0]}:{port}"
        self._crowded.add(bound)
        return bound

    def start(self) -> None:
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.is_serving = True

    def cut_stale_streams(self) -> None:
        """Cancel KeepAlive streams that are of no use any more, calls whose peers are silent, and
        streams whose caller may not have them any more. Cut connections that are too many.

        Refuse the calls that have waited too long for a thread, and let others run where silent
        peers hold threads up, too. To be called now and then.
        """
        self._keep_alives.cut_stale()
        self._arrivals.cut_late()
        self._replies.cut_late()
        if self._replies.are_too_many:
            self._stuck.cut()
        else:
            self._stuck.forget()
        for workers in (self._workers, self._attention_workers):
            workers.stand_in_for(self._arrivals.num_late(workers))
            workers.refuse_late()
        self._access.cut_revoked()
        self._crowded.cut()

    def works_within(self, timeout_s: float) -> bool:
        """Whether the core's lock can be taken and calls are answered; for a watchdog.

        More calls than there are threads for are no failure, as long as some have been answered
        since this was last asked.
        """
        lock = self._daemon.sequences.lock
        if not lock.acquire(timeout=timeout_s / 2):
            return False
        lock.release()
        probe = self._workers.submit(lambda: self._workers.refusal() is None)
        try:
            was_answered = probe.result(timeout_s / 2)
        except TimeoutError:
            was_answered = False
        num_ended, self._num_ended = self._num_ended, self._workers.num_ended
        return was_answered or num_ended != self._num_ended

    def stop(self, drain_timeout_s: float) -> bool:
        """Say that it is not serving, refuse new calls, and wait for running ones.

        Calls that wait for another's blocks are woken, and refused as new ones are; so are those
        that watch events.

        Streams are cut when the calls have ended: a health watch would last for ever. Until then
        steps are answered, and those that have begun are in any case. False if calls or steps
        were cut too, after the timeout: their threads run on until they are done.
        """
        deadline_s = time.monotonic() + drain_timeout_s
        self.is_serving = False
        self._daemon.is_draining = True
        self._waits.wake_all()
        self._event_streams.close()
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        stopped = self._server.stop(drain_timeout_s)
        calls_have_ended = all(
            workers.wait_until_idle(max(0.0, deadline_s - time.monotonic()))
            for workers in (self._workers, self._attention_workers)
        )
        steps_have_ended = self._step_streams.close(max(0.0, deadline_s - time.monotonic()))
        have_ended = calls_have_ended and steps_have_ended
        self._keep_alives.cut_all()
        if have_ended:
            stopped = self._server.stop(_LAST_REPLIES_S)
        stopped.wait()
        self._workers.shutdown(wait=False)
        self._attention_workers.shutdown(wait=False)
        return have_ended

    def _add_reflection(self) -> None:
        """`reflection.enable_server_reflection` would hold a worker for each open stream."""
        names = [*wire.service_names(), health.SERVICE_NAME, reflection.SERVICE_NAME]
        servicer = reflection.ReflectionServicer(names)

        def answer(requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with (
                    self._access.stream(context, None) as known,
                    self._reflections.opened(known.caller.tenant),
                ):
                    yield from servicer.ServerReflectionInfo(requests, context)
            except PrefixCacheError as error:
                context.abort_with_status(to_status(error, self._daemon.boot_id))

        run_in(self._reflections.workers, answer)
        handler = grpc.stream_stream_rpc_method_handler(
            answer,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        self._server.add_registered_method_handlers(
            reflection.SERVICE_NAME, {"ServerReflectionInfo": handler}
        )

    def _set_health(self, status: int) -> None:
        for service in ("", *wire.service_names()):
            self._health.set(service, status)
