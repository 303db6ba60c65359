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
from itertools import chain
from time import perf_counter
from typing import Any

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
from prefixcache.rpc.field_count import has_more_fields
from prefixcache.rpc.requests import RequestReader
from prefixcache.server.access import Access, StreamCaller
from prefixcache.server.arrivals import Arrivals
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.callers import Caller, needed_role
from prefixcache.server.calls import Call, Observers, Rpc
from prefixcache.server.incoming_calls import let_ask_early
from prefixcache.server.replies import Replies
from prefixcache.server.streams import Streams
from prefixcache.server.workers import Workers

_log = structlog.get_logger(__name__)

_Answer = Callable[[bytes, Call], bytes]
_OpenStream = Callable[[Callable[[], object], Caller], AbstractContextManager[Callable[[Any], Any]]]
_Watch = Callable[[Any, Caller | None, grpc.ServicerContext], Iterator[Any]]
_Admit = Callable[[grpc.ServicerContext], Caller]
_AdmitStream = Callable[[grpc.ServicerContext], AbstractContextManager[StreamCaller]]


@dataclass(frozen=True, slots=True)
class Service:
    """Who answers the RPCs of one service, and in whose threads.

    servicer: its method for the RPC `GetStats` is `get_stats(request, caller)`, which returns a
    message, a twin or not, or raises a PrefixCacheError; one with a parameter `context` gets gRPC's
    context of the call too. For the stream `Step` it is `open_step(cancel, caller)`, a context that
    lasts as long as the stream and gives what answers each message; `cancel` ends the stream, from
    any thread. For WatchEvents, a stream of one request, `watch_events(request, caller, context)`
    gives the replies, the first at once, and may raise between them.
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
    observers: Observers,
    boot_id: bytes,
    max_fields: int,
) -> None:
    """Register every RPC of the .proto files; services by their short names.

    streams: by the RPC's name. They run in threads of their own and not in their service's.
    transfers: gets the other calls. access: says who calls. call_counts: by the RPC's name.
    observers: are told of all calls. max_fields: of a request, with those of messages in it.
    """
    by_service: dict[str, dict[str, Any]] = {}
    for method in wire.methods():
        service_name = method.service.rpartition(".")[2]
        service, role = services[service_name], needed_role(service_name, method.name)
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        handlers = by_service.setdefault(method.service, {})
        counts = call_counts[method.name]
        rpc = Rpc(method, counts, boot_id, observers.access_log, observers.spans)
        if method.is_stream:
            admit_stream = partial(access.stream, needed_role=role)
            if method.is_watch:
                watch, arrivals = getattr(service.servicer, name), transfers.arrivals
                stream = _watch_handler(
                    rpc, watch, streams[method.name], arrivals, admit_stream, max_fields
                )
            else:
                open_stream = getattr(service.servicer, f"open_{name}")
                stream = _stream_handler(
                    rpc, open_stream, streams[method.name], admit_stream, max_fields
                )
            run_in(streams[method.name].workers, stream)
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(stream)
        else:
            answer = _answer(rpc, getattr(service.servicer, name), max_fields)
            admit = partial(access.caller, needed_role=role)
            handler = _handler(rpc, answer, service.workers, transfers, admit)
            run_in(service.workers, handler)
            let_ask_early(handler, admit)
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


def _handler(
    rpc: Rpc, answer: _Answer, workers: Workers, transfers: Transfers, admit: _Admit
) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with Call(rpc, context, workers.queue_s()) as call:
            refusal = workers.refusal()
            if refusal is not None:
                call.abort(refusal)
            try:
                call.caller = admit(context)
            except PrefixCacheError as error:
                call.abort(error)
            data = transfers.arrivals.request(requests, context, workers)
            if data is None:
                call.abort(InvalidArgumentError("request", "is missing"))
            # Its caller may have given up while it waited for a worker: done now, an Allocate
            # would make a sequence that nobody knows of. gRPC reports a passed deadline a little
            # late.
            if context.time_remaining() == 0:
                call.abort(DeadlineExceededError("the deadline passed in the queue"))
            if not context.is_active():
                call.abort(CancelledCallError("the call has ended before it began"))
            reply = answer(data, call)
            transfers.replies.leaves(context, len(reply))
            return reply

    return handle


def _stream_handler(
    rpc: Rpc,
    open_stream: _OpenStream,
    streams: Streams,
    admit: _AdmitStream,
    max_fields: int,
) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with (
                admit(context) as known,
                streams.opened(known.caller.tenant),
                open_stream(context.cancel, known.caller) as answer_request,
            ):
                answer = _answer(rpc, lambda request, caller: answer_request(request), max_fields)
                for data in requests:
                    known.check()
                    # gRPC asks for the next answer once this one has left.
                    with streams.answering():
                        with Call(rpc, context) as call:
                            call.caller = known.caller
                            reply = answer(data, call)
                        yield reply
        except PrefixCacheError as error:
            with Call(rpc, context) as call:
                call.abort(error)

    return handle


def _watch_handler(
    rpc: Rpc,
    watch: _Watch,
    streams: Streams,
    arrivals: Arrivals,
    admit: _AdmitStream,
    max_fields: int,
) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    """The call ends with its first reply, for those who observe calls."""
    reader = RequestReader(rpc.method)

    def begin(call: Call, requests: Iterator[bytes]) -> Iterator[Any]:
        started_s = perf_counter()
        data = arrivals.request(requests, call.context, streams.workers)
        if data is None:
            call.abort(InvalidArgumentError("request", "is missing"))
        call.num_bytes_in = len(data)
        try:
            call.request = _parse(rpc.method, reader, data, max_fields)
            replies = _without_bugs(watch(call.request, call.caller, call.context))
            first = next(replies)
        except PrefixCacheError as error:
            call.abort(error, perf_counter() - started_s)
        call.ended(perf_counter() - started_s)
        return chain([first], replies)

    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with admit(context) as known, streams.opened(known.caller.tenant):
                with Call(rpc, context) as call:
                    call.caller = known.caller
                    replies = begin(call, requests)
                for reply in replies:
                    known.check()
                    yield _serialize(reply)
        except PrefixCacheError as error:
            with Call(rpc, context) as call:
                call.abort(error)

    return handle


def _without_bugs(replies: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from replies
    except PrefixCacheError:
        raise
    except Exception as error:
        _log.exception("rpc failed")
        raise InternalError("internal error, see the daemon's log") from error


def _answer(rpc: Rpc, servicer_call: Callable[..., Any], max_fields: int) -> _Answer:
    """One message in, one out, or the call is aborted."""
    takes_context = "context" in inspect.signature(servicer_call).parameters
    reader = RequestReader(rpc.method)

    def answer(data: bytes, call: Call) -> bytes:
        call.num_bytes_in = len(data)
        started_s = perf_counter()
        try:
            call.request = _parse(rpc.method, reader, data, max_fields)
            context = (call.context,) if takes_context else ()
            call.reply = servicer_call(call.request, call.caller, *context)
        except PrefixCacheError as error:
            call.abort(error, perf_counter() - started_s)
        except Exception:  # noqa: BLE001 - the border: whatever it is, the call gets a status
            _log.exception("rpc failed")
            internal = InternalError("internal error, see the daemon's log")
            call.abort(internal, perf_counter() - started_s)
        call.ended(perf_counter() - started_s)
        reply = _serialize(call.reply)
        call.num_bytes_out = len(reply)
        return reply

    return answer


def _parse(method: wire.Method, reader: RequestReader, data: bytes, max_fields: int) -> Any:
    try:
        if has_more_fields(data, method.request.DESCRIPTOR, max_fields):
            raise InvalidArgumentError(
                "request", f"has more than {max_fields} fields", limit=max_fields
            )
        return reader.read(data)
    except (DecodeError, ValueError) as error:
        raise InvalidArgumentError("request", f"is not a {method.name} request") from error


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
