"""The handlers of a daemon's RPCs without a network: bytes in, a status code and replies out.

They are the very functions that gRPC calls, caught as the server registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from prefixcache.rpc import wire

Metadata = Sequence[tuple[str, str | bytes]]
METHODS = {method.name: method for method in wire.methods()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended. UNKNOWN is what gRPC makes of an exception that nobody caught."""

    code: grpc.StatusCode
    details: str
    replies: tuple[Any, ...] = ()


class Handlers:
    """By the RPC's name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def caught(self, handlers: dict[str, Any]) -> None:
        self._handlers |= handlers

    def call(self, name: str, messages: Sequence[bytes], metadata: Metadata = ()) -> Outcome:
        """In a thread of those that gRPC would give it."""
        handler = self._handlers[name]
        answer = handler.stream_unary or handler.stream_stream
        workers = answer.experimental_thread_pool
        outcome: Outcome = workers.submit(self._call, name, messages, metadata).result()
        return outcome

    def _call(self, name: str, messages: Sequence[bytes], metadata: Metadata) -> Outcome:
        handler, method = self._handlers[name], METHODS[name]
        context = _Context(metadata)
        try:
            if method.is_stream:
                found = handler.stream_stream(iter(messages), context)
                if method.is_watch:
                    # It would go on for ever.
                    with closing(found) as watch:
                        found = [next(watch)]
            else:
                found = (handler.stream_unary(iter(messages), context),)
            serialize = handler.response_serializer or bytes
            replies = [_read(method, serialize(reply)) for reply in found]
        except _Aborted as end:
            return Outcome(end.code, end.details)
        except Exception as error:  # noqa: BLE001 - what the handler lets through is a finding
            return Outcome(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
        finally:
            context.end()
        return Outcome(grpc.StatusCode.OK, "", tuple(replies))


@contextmanager
def caught_handlers() -> Iterator[Handlers]:
    """Servers that are made meanwhile are real ones, whose handlers are caught."""
    handlers = Handlers()
    make_server = grpc.server

    def make(*args: Any, **kwargs: Any) -> _Catching:
        return _Catching(make_server(*args, **kwargs), handlers.caught)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc, "server", make)
        yield handlers


class _Catching:
    def __init__(self, server: grpc.Server, catch: Callable[[dict[str, Any]], None]) -> None:
        self._server = server
        self._catch = catch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        if service in wire.service_names():
            self._catch(handlers)
        self._server.add_registered_method_handlers(service, handlers)


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        self.details = details


class _Context(grpc.ServicerContext):
    """Of a call without a deadline, over a Unix socket."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._callbacks: list[Callable[[], Any]] = []

    def end(self) -> None:
        """The caller has what it will get."""
        for callback in self._callbacks:
            callback()

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return "unix:"

    def peer_identities(self) -> Any:
        return None

    def peer_identity_key(self) -> Any:
        return None

    def auth_context(self) -> Any:
        return {}

    def set_compression(self, compression: Any) -> None: ...

    def send_initial_metadata(self, initial_metadata: Any) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None: ...

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        raise _Aborted(code, details)

    def abort_with_status(self, status: Any) -> Any:
        raise _Aborted(status.code, status.details)

    def set_code(self, code: Any) -> None: ...

    def set_details(self, details: str) -> None: ...

    def disable_next_message_compression(self) -> None: ...

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> Any:
        return None

    def cancel(self) -> bool:
        return True

    def add_callback(self, callback: Any) -> bool:
        self._callbacks.append(callback)
        return True


def _read(method: wire.Method, data: bytes) -> Message:
    return method.response.FromString(data)
