"""OpenTelemetry: a span for each call, sent over OTLP.

The only module that knows OpenTelemetry, which is an optional extra. Spans are sent by a thread of
their own, from a queue that drops what it cannot hold, so a collector that is slow or gone delays
no call. The standard environment variables OTEL_* hold for what is no argument here: names of the
service, sampling, headers, certificates, sizes of the queue.

Attributes are those of OpenTelemetry's conventions for RPCs, and `prefixcache.*`: counts, digests
and request ids, and no token ids.

Safe to use from many threads. Nothing global is set but the logger of OpenTelemetry itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import grpc
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from prefixcache import __version__
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc import wire
from prefixcache.server.calls import Call
from prefixcache.server.trace_context import TraceContext, trace_context_of

_log = structlog.get_logger(__name__)

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CLOSE_TIMEOUT_S = 2.0
_OTEL_LOGGER = "opentelemetry"

_SERVER_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes that are the server's fault, by OpenTelemetry's conventions."""


def make_exporter(endpoint: str, environ: Mapping[str, str]) -> SpanExporter:
    """Sends to an OTLP collector. endpoint: its URL, without the path of the traces.

    Raises InvalidArgumentError for a protocol, which the environment names, that is not known.
    """
    name = next((name for name in _PROTOCOLS if environ.get(name)), _PROTOCOLS[-1])
    protocol = environ.get(name) or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpSpanExporter,
        )

        return HttpSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    raise InvalidArgumentError(name, f"is {protocol!r}, must be grpc or http/protobuf")


class Tracing:
    """The daemon's `Spans`, and the spans of attention within them. `close` it at the end."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._log_handler = _ToOurLog()
        logger = logging.getLogger(_OTEL_LOGGER)
        logger.addHandler(self._log_handler)
        logger.propagate = False
        # Its own end would wait for the collector once more when the process ends.
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("prefixcache", __version__)

    def begin(self, call: Call) -> CallSpan:
        """The span of a call begins when the call has begun to wait for a thread."""
        method = call.rpc.method
        parent = otel_context.Context()
        caller = trace_context_of(call.context.invocation_metadata())
        if caller is not None:
            parent = trace.set_span_in_context(_remote_span(caller), parent)
        span = self._tracer.start_span(
            f"{method.service}/{method.name}",
            parent,
            trace.SpanKind.SERVER,
            _method_attributes(method),
            start_time=time.time_ns() - round(call.queue_s * 1e9),
        )
        return CallSpan(span)

    def attention(self) -> AbstractContextManager[object]:
        """The kernels of the call that this thread answers run meanwhile."""
        return self._tracer.start_as_current_span(
            "attention", record_exception=False, set_status_on_exception=False
        )

    def flush(self) -> None:
        """Send the spans that have ended. Waits for the collector."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what is left, if the collector takes it within a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
        if closing.is_alive():
            _log.warning("the last spans were not taken", timeout_s=_CLOSE_TIMEOUT_S)
        logger = logging.getLogger(_OTEL_LOGGER)
        logger.removeHandler(self._log_handler)
        logger.propagate = True


class CallSpan:
    """The span of one call, current in the thread that answers it until its end."""

    __slots__ = ("_span", "_token", "span_id", "trace_id")

    def __init__(self, span: trace.Span) -> None:
        ids = span.get_span_context()
        # OTEL_SDK_DISABLED makes spans without ids.
        self.trace_id = trace.format_trace_id(ids.trace_id) if ids.is_valid else ""
        self.span_id = trace.format_span_id(ids.span_id) if ids.is_valid else ""
        self._span = span
        self._token = otel_context.attach(trace.set_span_in_context(span))

    def end(self, call: Call) -> None:
        otel_context.detach(self._token)
        if self._span.is_recording():
            self._span.set_attributes(_call_attributes(call))
            if call.code in _SERVER_ERRORS:
                self._span.set_status(trace.StatusCode.ERROR, call.code)
        self._span.end()


class _ToOurLog(logging.Handler):
    """What OpenTelemetry logs, as of a collector that is gone, in the form of the daemon's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        _log.warning("tracing", problem=record.getMessage())


def _resource() -> Resource:
    """The environment's, which may name the service."""
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "prefixcache"}))
    return resource


def _remote_span(caller: TraceContext) -> trace.Span:
    return trace.NonRecordingSpan(
        trace.SpanContext(
            int(caller.trace_id, 16),
            int(caller.span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(caller.flags),
            trace_state=trace.TraceState.from_header([caller.state]),
        )
    )


def _method_attributes(method: wire.Method) -> dict[str, str]:
    return {"rpc.system": "grpc", "rpc.service": method.service, "rpc.method": method.name}


def _call_attributes(call: Call) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "rpc.grpc.status_code": grpc.StatusCode[call.code].value[0],
        "prefixcache.queue_s": call.queue_s,
    }
    fields = call.fields()
    for name in ("tenant", "session", "request_ids"):
        if name in fields:
            attributes[f"prefixcache.{name}"] = fields[name]
    tokens = call.tokens()
    if tokens is not None:
        attributes["prefixcache.queried_tokens"] = tokens.queried
        attributes["prefixcache.cached_tokens"] = tokens.cached
    return attributes
