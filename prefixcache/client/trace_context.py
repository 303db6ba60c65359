"""The trace that a client's calls belong to: the application's current OpenTelemetry span, if any.

OpenTelemetry is not imported: without it in the process there is no span. Safe to use from many
threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from prefixcache.client.credentials import Metadata

_API = "opentelemetry.trace"


def with_trace(stub: Callable[..., Any]) -> Callable[..., Any]:
    """The stub, whose calls carry `traceparent` and `tracestate` of the span that makes them."""

    def call(*arguments: Any, metadata: Metadata | None = None, **options: Any) -> Any:
        if _API in sys.modules:
            metadata = (*(metadata or ()), *_current_trace())
        return stub(*arguments, metadata=metadata, **options)

    return call


def _current_trace() -> Metadata:
    """As W3C Trace Context spells it; empty outside of spans."""
    span = sys.modules[_API].get_current_span().get_span_context()
    if not span.is_valid:
        return ()
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    state = span.trace_state.to_header()
    return (("traceparent", parent), *((("tracestate", state),) if state else ()))
