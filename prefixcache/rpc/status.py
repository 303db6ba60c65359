"""Errors on the wire: one table of error class <-> gRPC status code and reason.

A status carries `google.rpc.ErrorInfo` (domain "prefixcache", the error's reason, its fields and
the daemon's boot id) and, where a retry can help, `google.rpc.RetryInfo`. The server turns errors
into statuses with `to_status`, clients turn them back with `from_rpc_error`; neither reads text.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from prefixcache import errors
from prefixcache.errors import PrefixCacheError

ERROR_DOMAIN = "prefixcache"
MAX_TEXT_CHARS = 512
"""Length of a message or a field: statuses travel in trailers, and gRPC drops large trailers."""
RETRY_DELAY_S = 0.1
"""Suggested wait before a request that found no room, or no thread, comes again."""
_RETRY_LATER = (
    errors.NoRoomError,
    errors.QuotaExceededError,
    errors.TooManyCallsError,
    errors.WaitedTooLongError,
)

STATUS_CODES: dict[type[PrefixCacheError], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    errors.ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.AbortedError: grpc.StatusCode.ABORTED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledCallError: grpc.StatusCode.CANCELLED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
"""The classes directly under PrefixCacheError; subclasses share their code."""

_BY_CODE = {code: error for error, code in STATUS_CODES.items()}
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def _subclasses(base: type[PrefixCacheError]) -> list[type[PrefixCacheError]]:
    return [base, *(found for child in base.__subclasses__() for found in _subclasses(child))]


_BY_REASON = {error.reason: error for error in _subclasses(PrefixCacheError)}


def status_code(error: PrefixCacheError) -> grpc.StatusCode:
    return next(STATUS_CODES[base] for base in type(error).__mro__ if base in STATUS_CODES)


def status_message(error: PrefixCacheError, boot_id: bytes) -> status_pb2.Status:
    """The error as `google.rpc.Status`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    info.metadata["boot_id"] = boot_id.hex()
    for name, value in error.fields.items():
        info.metadata[name] = _cut(str(value))
    status = status_pb2.Status(code=status_code(error).value[0], message=_cut(error.message))
    status.details.append(_packed(info))
    is_permanent = isinstance(error, errors.QuotaExceededError) and error.is_permanent
    if isinstance(error, _RETRY_LATER) and not is_permanent:
        delay = duration_pb2.Duration(nanos=int(RETRY_DELAY_S * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def to_status(error: PrefixCacheError, boot_id: bytes) -> grpc.Status:
    """What a handler aborts with."""
    wire_status: Any = rpc_status.to_status(status_message(error, boot_id))
    if isinstance(error, errors.DrainingError):
        # gRPC's own retries would come back to a daemon that is about to end.
        wire_status = wire_status._replace(
            trailing_metadata=(*wire_status.trailing_metadata, ("grpc-retry-pushback-ms", "-1"))
        )
    checked: grpc.Status = wire_status
    return checked


def from_rpc_error(error: grpc.RpcError) -> PrefixCacheError:
    """The error that the server raised, or the closest class for one of gRPC's own."""
    return _from_parts(error.code(), error.details() or "", _error_info(error))


def from_status_message(data: bytes) -> PrefixCacheError:
    """The error that `status_message` was made of, from its bytes."""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return errors.InternalError("the daemon sent a status that cannot be read")
    code = _GRPC_CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _from_parts(code, status.message, _info_in(status))


def _from_parts(
    code: grpc.StatusCode, message: str, info: error_details_pb2.ErrorInfo | None
) -> PrefixCacheError:
    by_code = _BY_CODE.get(code, PrefixCacheError)
    if info is None:
        return by_code.from_wire(f"{code.name}: {message or code.name}", {})
    fields: dict[str, str | int] = dict(info.metadata)
    return _BY_REASON.get(info.reason, by_code).from_wire(message or code.name, fields)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            try:
                return _info_in(status_pb2.Status.FromString(value))
            except DecodeError:
                return None
    return None


def _info_in(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return info
    return None
