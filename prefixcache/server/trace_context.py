"""Whose trace a call belongs to: the `traceparent` and `tracestate` that came with it.

W3C Trace Context, https://www.w3.org/TR/trace-context/: what is not valid is taken as not there.
Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_VERSION, _TRACE_ID, _PARENT_ID, _FLAGS = (
    "[0-9a-f]{2}",
    "[0-9a-f]{32}",
    "[0-9a-f]{16}",
    "[0-9a-f]{2}",
)
_TRACEPARENT = re.compile(f"({_VERSION})-({_TRACE_ID})-({_PARENT_ID})-({_FLAGS})(-.*)?", re.DOTALL)
_KNOWN_VERSION = "00"
_FORBIDDEN_VERSION = "ff"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The caller's span. trace_id, span_id: hexadecimal, as on the wire. state: `tracestate`."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""


def trace_context_of(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """Of a call's metadata; None if it belongs to no trace."""
    parents, states = [], []
    for key, value in metadata:
        if key == "traceparent":
            parents.append(value)
        elif key == "tracestate" and isinstance(value, str):
            states.append(value)
    if len(parents) != 1 or not isinstance(parents[0], str):
        return None
    match = _TRACEPARENT.fullmatch(parents[0])
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Later versions may have more fields; this one has none.
    if version == _FORBIDDEN_VERSION or (version == _KNOWN_VERSION and rest is not None):
        return None
    if not (int(trace_id, 16) and int(span_id, 16)):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16), ",".join(states))
