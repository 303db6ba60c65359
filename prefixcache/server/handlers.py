"""From a method's bytes to its servicer and back: parsing, errors, serialising.

The one place where any exception may end, so that every call gets a status of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    PrefixCacheError,
)
from prefixcache.rpc import wire
from prefixcache.rpc.status import to_status

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """Who answers the RPCs of one service, and in whose threads.

    servicer: its method for the RPC `GetStats` is `get_stats(request)`, which returns a message,
    a twin or not, or raises a PrefixCacheError.
    """

    servicer: object
    workers: ThreadPoolExecutor


def add_services(server: grpc.Server, services: Mapping[str, Service], boot_id: bytes) -> None:
    """Register every RPC of the .proto files; services by their short names."""
    by_service: dict[str, dict[str, Any]] = {}
    for method in wire.methods():
        service = services[method.service.rpartition(".")[2]]
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        handler = _handler(method, getattr(service.servicer, name), boot_id)
        run_in(service.workers, handler)
        by_service.setdefault(method.service, {})[method.name] = (
            grpc.unary_unary_rpc_method_handler(handler, response_serializer=_serialize)
        )
    for full_name, handlers in by_service.items():
        server.add_registered_method_handlers(full_name, handlers)


def run_in(workers: ThreadPoolExecutor, handler: Callable[..., Any]) -> None:
    """Let a handler function run in threads of its own, not in the server's.

    The attribute is how grpcio's own health service says it.
    """
    handler.experimental_thread_pool = workers  # type: ignore[attr-defined]


def _handler(
    method: wire.Method, call: Callable[[Any], Any], boot_id: bytes
) -> Callable[[bytes, grpc.ServicerContext], Any]:
    def handle(data: bytes, context: grpc.ServicerContext) -> Any:
        # Its caller may have given up while it waited for a worker: done now, an Allocate would
        # make a sequence that nobody knows of. gRPC reports a passed deadline a little late.
        if context.time_remaining() == 0:
            _abort(context, DeadlineExceededError("the deadline passed in the queue"), boot_id)
        if not context.is_active():
            _abort(context, CancelledCallError("the call has ended before it began"), boot_id)
        try:
            return call(_parse(method, data))
        except PrefixCacheError as error:
            _abort(context, error, boot_id)
        except Exception:  # noqa: BLE001 - the border: whatever it is, the call gets a status
            _log.exception("rpc failed", method=method.path)
            _abort(context, InternalError("internal error, see the daemon's log"), boot_id)

    return handle


def _parse(method: wire.Method, data: bytes) -> Any:
    try:
        return method.request.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"is not a {method.name} request") from error


def _abort(context: grpc.ServicerContext, error: PrefixCacheError, boot_id: bytes) -> NoReturn:
    context.abort_with_status(to_status(error, boot_id))


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
