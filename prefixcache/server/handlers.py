"""From a method's bytes to its servicer and back: parsing, errors, serialising.

The one place where any exception may end, so that every call gets a status of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from prefixcache.errors import InternalError, InvalidArgumentError, PrefixCacheError
from prefixcache.rpc import wire
from prefixcache.rpc.status import to_status

_log = structlog.get_logger(__name__)


def add_services(server: grpc.Server, servicers: Mapping[str, object], boot_id: bytes) -> None:
    """Register every RPC of the .proto files.

    servicers: by short service name; the method for `GetStats` is `get_stats(request)`, which
    returns a message, a twin or not, or raises a PrefixCacheError.
    """
    by_service: dict[str, dict[str, Any]] = {}
    for method in wire.methods():
        servicer = servicers[method.service.rpartition(".")[2]]
        call = getattr(servicer, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
        by_service.setdefault(method.service, {})[method.name] = (
            grpc.unary_unary_rpc_method_handler(
                _handler(method, call, boot_id), response_serializer=_serialize
            )
        )
    for service, handlers in by_service.items():
        server.add_registered_method_handlers(service, handlers)


def _handler(
    method: wire.Method, call: Callable[[Any], Any], boot_id: bytes
) -> Callable[[bytes, grpc.ServicerContext], Any]:
    def handle(data: bytes, context: grpc.ServicerContext) -> Any:
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
