"""From a method's bytes to its servicer and back: who calls, parsing, errors, serialising.

The one place where any exception may end, so that every call gets a status of ours.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
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
from prefixcache.rpc.status import status_code, to_status
from prefixcache.server.access import Access, StreamCaller
from prefixcache.server.arrivals import Arrivals
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.callers import Caller, needed_role
from prefixcache.server.replies import Replies
from prefixcache.server.streams import Streams
from prefixcache.server.workers import Workers

_log = structlog.get_logger(__name__)

_Answer = Callable[..., Any]
_OpenStream = Callable[[Callable[[], object], Caller], AbstractContextManager[Callable[[Any], Any]]]
_Admit = Callable[[grpc.ServicerContext], Caller]
_AdmitStream = Callable[[grpc.ServicerContext], AbstractContextManager[StreamCaller]]


@dataclass(frozen=True, slots=True)
class Service:
    """Who answers the RPCs of one service, and in whose threads.

    servicer: its method for the RPC `GetStats` is `get_stats(request, caller)`, which returns a
    message, a twin or not, or raises a PrefixCacheError; one with a parameter `context` gets gRPC's
    context of the call too. For the stream `Step` it is `open_step(cancel, caller)`, a context that
    lasts as long as the stream and gives what answers each message; `cancel` ends the stream, from
    any thread.
    """

    servicer: object
    workers: Workers


@dataclass(frozen=True, slots=True)
class Transfers:
    """What watches over peers that are slow or silent, at both ends of a unary call."""

    arrivals: Arrivals
    replies: Replies


def add_services(
    server: grpc.Server,
    services: Mapping[str, Service],
    streams: Mapping[str, Streams],
    transfers: Transfers,
    access: Access,
    call_counts: Mapping[str, CallCounts],
    boot_id: bytes,
) -> None:
    """Register every RPC of the .proto files; services by their short names.

    streams: by the RPC's name. They run in threads of their own and not in their service's.
    transfers: gets the other calls. access: says who calls. call_counts: by the RPC's name.
    """
    by_service: dict[str, dict[str, Any]] = {}
    for method in wire.methods():
        service_name = method.service.rpartition(".")[2]
        service, role = services[service_name], needed_role(service_name, method.name)
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        handlers = by_service.setdefault(method.service, {})
        calls = _Calls(call_counts[method.name], boot_id)
        if method.is_stream:
            open_stream = getattr(service.servicer, f"open_{name}")
            admit_stream = partial(access.stream, needed_role=role)
            stream = _stream_handler(method, open_stream, streams[method.name], admit_stream, calls)
            run_in(streams[method.name].workers, stream)
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(
                stream, response_serializer=_serialize
            )
        else:
            answer = _answer(method, getattr(service.servicer, name), calls)
            admit = partial(access.caller, needed_role=role)
            handler = _handler(answer, service.workers, transfers, admit, calls)
            run_in(service.workers, handler)
            # As a stream of one request, which does not cost more: gRPC would else wait for the
            # request by itself, without a limit.
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(handler)
    for full_name, handlers in by_service.items():
        server.add_registered_method_handlers(full_name, handlers)


def run_in(workers: ThreadPoolExecutor, handler: Callable[..., Any]) -> None:
    """Let a handler function run in threads of its own, not in the server's.

    The attribute is how grpcio's own health service says it.
    """
    handler.experimental_thread_pool = workers  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Calls:
    """How the calls of one RPC end: all of them are counted, and the refused ones get a status."""

    counts: CallCounts
    boot_id: bytes

    def abort(
        self, context: grpc.ServicerContext, error: PrefixCacheError, duration_s: float = 0.0
    ) -> NoReturn:
        self.counts.add(duration_s, status_code(error).name)
        context.abort_with_status(to_status(error, self.boot_id))


def _handler(
    answer: _Answer, workers: Workers, transfers: Transfers, admit: _Admit, calls: _Calls
) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        refusal = workers.refusal()
        if refusal is not None:
            calls.abort(context, refusal)
        try:
            caller = admit(context)
        except PrefixCacheError as error:
            calls.abort(context, error)
        data = transfers.arrivals.request(requests, context)
        if data is None:
            calls.abort(context, InvalidArgumentError("request", "is missing"))
        # Its caller may have given up while it waited for a worker: done now, an Allocate would
        # make a sequence that nobody knows of. gRPC reports a passed deadline a little late.
        if context.time_remaining() == 0:
            calls.abort(context, DeadlineExceededError("the deadline passed in the queue"))
        if not context.is_active():
            calls.abort(context, CancelledCallError("the call has ended before it began"))
        reply = _serialize(answer(data, context, caller))
        transfers.replies.leaves(context, len(reply))
        return reply

    return handle


def _stream_handler(
    method: wire.Method,
    open_stream: _OpenStream,
    streams: Streams,
    admit: _AdmitStream,
    calls: _Calls,
) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[Any]]:
    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            with (
                admit(context) as known,
                streams.opened(),
                open_stream(context.cancel, known.caller) as call,
            ):
                answer = _answer(method, call, calls)
                for data in requests:
                    known.check()
                    # gRPC asks for the next answer once this one has left.
                    with streams.answering():
                        yield answer(data, context)
        except PrefixCacheError as error:
            calls.abort(context, error)

    return handle


def _answer(method: wire.Method, call: Callable[..., Any], calls: _Calls) -> _Answer:
    """One message in, one out, or the call is aborted. A stream's call knows its caller."""
    takes_context = "context" in inspect.signature(call).parameters
    reader = wire.RequestReader(method)

    def answer(data: bytes, context: grpc.ServicerContext, *caller: Caller) -> Any:
        started_s = perf_counter()
        try:
            request = _parse(method, reader, data)
            reply = call(request, *caller, context) if takes_context else call(request, *caller)
        except PrefixCacheError as error:
            calls.abort(context, error, perf_counter() - started_s)
        except Exception:  # noqa: BLE001 - the border: whatever it is, the call gets a status
            _log.exception("rpc failed", method=method.path)
            internal = InternalError("internal error, see the daemon's log")
            calls.abort(context, internal, perf_counter() - started_s)
        calls.counts.add(perf_counter() - started_s)
        return reply

    return answer


def _parse(method: wire.Method, reader: wire.RequestReader, data: bytes) -> Any:
    try:
        return reader.read(data)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"is not a {method.name} request") from error


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
