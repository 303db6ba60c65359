"""One call at the daemon's border: how it ended, and what the log and a trace say of it.

A `Call` is entered by the thread that answers it. What is logged in that thread until it is left
carries the call's fields; they are gathered only when a line is made. Token ids, salts and the ids
of owners and sessions, which are keys to their sequences, are in none of them: a session shows as
the digest that `ListSessions` shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, NoReturn, Protocol

import grpc
import structlog

from prefixcache.core.sessions import SESSION_ID_BYTES, owner_digest
from prefixcache.errors import PrefixCacheError
from prefixcache.rpc import wire
from prefixcache.rpc.status import status_code, to_status
from prefixcache.server.call_counts import OK, CallCounts
from prefixcache.server.callers import Caller
from prefixcache.server.checks import MAX_REQUEST_ID_BYTES, OWNER_BYTES
from prefixcache.server.daemon import MAX_STEP_ALLOCATES
from prefixcache.server.trace_context import trace_context_of

_log = structlog.get_logger(__name__)

_MAX_REQUEST_IDS = 16
"""Of one call in a log line; a Fork or a Step may have thousands."""
_TOKEN_ID_BYTES = 4
"""In a column of a twin."""
_UNKNOWN = grpc.StatusCode.UNKNOWN.name
"""What gRPC makes of an exception that no status was given for."""


class Span(Protocol):
    """trace_id, span_id: hexadecimal."""

    trace_id: str
    span_id: str

    def end(self, call: Call) -> None:
        """Called by the thread that began it."""


class Spans(Protocol):
    """Whoever follows traces: each call is a span of one."""

    def begin(self, call: Call) -> Span: ...


class AccessLog:
    """One line for each call, at level debug. `is_on` may be set at any time, from any thread."""

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on = is_on

    def write(self, call: Call) -> None:
        _log.debug(
            "call",
            code=call.code,
            duration_s=round(call.duration_s, 6),
            queue_s=round(call.queue_s, 6),
            bytes_in=call.num_bytes_in,
            bytes_out=call.num_bytes_out,
            peer=call.context.peer(),
        )


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told of each call. spans: None if no traces are followed."""

    access_log: AccessLog = field(default_factory=AccessLog)
    spans: Spans | None = None


@dataclass(frozen=True, slots=True)
class Rpc:
    """What the calls of one RPC have in common."""

    method: wire.Method
    counts: CallCounts
    boot_id: bytes
    access_log: AccessLog
    spans: Spans | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of prompts that were looked for in the cache, and those that were there."""

    queried: int
    cached: int


class Call:
    """One call, or one message of a stream. code: name of its gRPC status code.

    queue_s: how long it waited for a thread. duration_s: as `CallCounts` has it. caller, request
    and reply are None until they are known.
    """

    # Defaults of the class and no slots: each call is made anew, and sets few of them.
    queue_s: float
    duration_s = 0.0
    num_bytes_in = 0
    num_bytes_out = 0
    code = OK
    caller: Caller | None = None
    request: Any = None
    reply: Any = None
    span: Span | None = None

    def __init__(self, rpc: Rpc, context: grpc.ServicerContext, queue_s: float = 0.0) -> None:
        self.rpc = rpc
        self.context = context
        self.queue_s = queue_s

    def __enter__(self) -> Call:
        _CURRENT.set(self)
        spans = self.rpc.spans
        if spans is not None:
            self.span = spans.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self.code == OK:
            self.code = _UNKNOWN
        if self.span is not None:
            self.span.end(self)
        access_log = self.rpc.access_log
        if access_log.is_on:
            access_log.write(self)
        _CURRENT.set(None)

    def ended(self, duration_s: float, code: str = OK) -> None:
        self.duration_s, self.code = duration_s, code
        self.rpc.counts.add(duration_s, code)

    def abort(self, error: PrefixCacheError, duration_s: float = 0.0) -> NoReturn:
        self.ended(duration_s, status_code(error).name)
        self.context.abort_with_status(to_status(error, self.rpc.boot_id))

    def fields(self) -> dict[str, Any]:
        """For a line of the log; those that are unknown or empty are left out."""
        fields = {
            "method": self.rpc.method.path,
            "tenant": self.caller.tenant if self.caller is not None else "",
            "session": self.session_digest(),
            "request_ids": list(islice(self.request_ids(), _MAX_REQUEST_IDS)),
            **self._trace_fields(),
        }
        return {name: value for name, value in fields.items() if value}

    def session_digest(self) -> str:
        """Of the session, or of the owner that a client without one made up; empty if none."""
        owners = (_owner_of(part) for part in (*self.parts(), self.reply))
        owner = next(filter(None, owners), b"")
        if len(owner) not in (OWNER_BYTES, SESSION_ID_BYTES) or self.caller is None:
            return ""
        return owner_digest(self.caller.owner_key(owner))

    def request_ids(self) -> Iterable[str]:
        """Those that the client gave; of one that is refused as too long, its beginning."""
        for part in self.parts():
            for request_id in (getattr(part, "request_id", ""), *getattr(part, "request_ids", ())):
                if request_id:
                    yield request_id[:MAX_REQUEST_ID_BYTES]

    def tokens(self) -> Tokens | None:
        """Of prompts; None of a call that brings none, or was refused."""
        if self.reply is None:
            return None
        parts, replies = self.parts(), [self.reply]
        if self.rpc.method.name == "Step":
            parts, replies = list(self.request.allocates), list(self.reply.allocates)
        if not replies or not hasattr(replies[0], "num_cached_tokens"):
            return None
        return Tokens(
            sum(len(part.token_ids) // _TOKEN_ID_BYTES for part in parts),
            sum(reply.num_cached_tokens for reply in replies),
        )

    def parts(self) -> list[Any]:
        """The request, or the requests that a step is made of."""
        if self.rpc.method.name != "Step" or self.request is None:
            return [self.request]
        step = self.request
        allocates = islice(step.allocates, MAX_STEP_ALLOCATES)
        return [step.free, step.commit, step.append, *allocates]

    def _trace_fields(self) -> dict[str, str]:
        if self.span is not None:
            return {"trace_id": self.span.trace_id, "span_id": self.span.span_id}
        caller = trace_context_of(self.context.invocation_metadata())
        return {} if caller is None else {"trace_id": caller.trace_id}


_CURRENT: ContextVar[Call | None] = ContextVar("prefixcache_call", default=None)
"""The call that a thread answers."""


def add_call_fields(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A structlog processor: a line that is logged while a call is answered says which."""
    call = _CURRENT.get()
    return event if call is None else {**call.fields(), **event}


def _owner_of(message: Any) -> bytes:
    for name in ("owner", "session_id"):
        owner: bytes = getattr(message, name, b"")
        if owner:
            return owner
    batch = getattr(message, "batch", None)
    return b"" if batch is None else _owner_of(batch)
