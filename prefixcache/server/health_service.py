"""grpc.health.v1: gRPC's own servicer, behind the daemon's limits.

Registered by itself, it would hold a worker for each peer that asks for a check and sends no
request, and let any number of watches wait for a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from prefixcache.errors import InvalidArgumentError, PrefixCacheError
from prefixcache.rpc.status import to_status
from prefixcache.server.arrivals import Arrivals
from prefixcache.server.handlers import run_in
from prefixcache.server.streams import Streams


class HealthService:
    """workers: answer checks. watches: the open streams, and their threads."""

    def __init__(
        self, workers: ThreadPoolExecutor, watches: Streams, arrivals: Arrivals, boot_id: bytes
    ) -> None:
        # The non-blocking mode needs no threads and deadlocks: it sends a watch's first status
        # under a lock that gRPC's only serving thread takes when another watch ends.
        self._servicer = health.HealthServicer(experimental_non_blocking=False)
        self._workers = workers
        self._watches = watches
        self._arrivals = arrivals
        self._boot_id = boot_id

    def set(self, service: str, status: int) -> None:
        self._servicer.set(service, status)

    def add_to(self, server: grpc.Server) -> None:
        def check(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            try:
                return self._servicer.Check(
                    self._request(requests, context, self._workers), context
                )
            except PrefixCacheError as error:
                context.abort_with_status(to_status(error, self._boot_id))

        def watch(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with self._watches.opened():
                    request = self._request(requests, context, self._watches.workers)
                    yield from self._servicer.Watch(request, context)
            except PrefixCacheError as error:
                context.abort_with_status(to_status(error, self._boot_id))

        run_in(self._workers, check)
        run_in(self._watches.workers, watch)
        codec = (
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        # As streams of one request, see `handlers`.
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(check, *codec),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, *codec),
        }
        server.add_registered_method_handlers(health.SERVICE_NAME, handlers)

    def _request(
        self,
        requests: Iterator[Any],
        context: grpc.ServicerContext,
        threads: ThreadPoolExecutor,
    ) -> Any:
        request = self._arrivals.request(requests, context, threads)
        if request is None:
            raise InvalidArgumentError("request", "is missing")
        return request
