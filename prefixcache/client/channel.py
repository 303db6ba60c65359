"""How a client reaches a daemon: channel options, which calls gRPC may repeat, and the stubs.

Owns no connection. Both kinds of channel, `grpc` and `grpc.aio`, take the same options and stubs.
"""

from __future__ import annotations

import json
import os
from typing import Any

import grpc
import grpc.aio

from prefixcache.address import Address, parse_address
from prefixcache.client.credentials import Bearer
from prefixcache.client.trace_context import with_trace
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc import wire

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_SESSION_TTL_S = 60.0
"""Long enough for an event loop that a model's start holds up."""
DEFAULT_MAX_MESSAGE_BYTES = 256 * 2**20
"""The daemon's own default."""

REPEATABLE = frozenset(
    {
        # They change nothing.
        "GetServerInfo",
        "Lookup",
        "Explain",
        "GetStats",
        "ListSequences",
        "ListSessions",
        "WatchEvents",
        # The client always sends request ids.
        "OpenSession",
        "Allocate",
        "Fork",
        # They say at which position the sequence stands, so the daemon knows a repeat.
        "Append",
        "Commit",
        "Truncate",
        "Prefill",
        "Decode",
        # The second time there is nothing left to do.
        "Free",
        "CloseSession",
    }
)
"""RPCs that do no more when they arrive twice than when they arrive once.

ResetCache is none: blocks may have been cached between its first arrival and its second.
"""

SEND_ERRORS = (grpc.RpcError, ValueError, grpc.aio.UsageError)
"""What a stub may raise; the last two are those of a closed channel, for threads and asyncio."""

_MAX_ATTEMPTS = 4
_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 20_000
_FIRST_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 2_000


def resolve_address(target: str) -> Address:
    """`unix:/path` or `host:port`. Raises InvalidArgumentError."""
    try:
        return parse_address(target)
    except ValueError as error:
        raise InvalidArgumentError("target", str(error)) from None


def channel_options(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> list[tuple[str, str | int]]:
    """Options of a channel to a daemon. Sizes are bytes of one message, either way."""
    return [
        ("grpc.service_config", service_config()),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # gRPC repeats no call whose request is larger than this; its default of 256 KiB is half
        # of a long prompt. The bytes are shared with the call, not copied.
        ("grpc.per_rpc_retry_buffer_size", max_message_bytes),
        # Pings go out only while a call runs, six times as far apart as the daemon permits. A
        # peer that is gone without a word is then noticed within a minute.
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        # The daemon is near, and back soon after a restart: gRPC's own 1 s to 120 s are too long.
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
        # Channels of one target and equal options share a connection, unless they are of another
        # process: a child's must not use its parent's.
        ("prefixcache.process", os.getpid()),
        # K/V must not travel through a proxy that the environment names for web traffic.
        ("grpc.enable_http_proxy", 0),
    ]


def service_config() -> str:
    """gRPC's service config (JSON): repeat `REPEATABLE` calls that end as UNAVAILABLE.

    Waits are random, up to 0.1 s, 0.2 s and 0.4 s before the second, third and fourth attempt;
    all of them count towards the call's deadline.
    """
    names = [
        {"service": method.service, "method": method.name}
        for method in wire.methods()
        if method.name in REPEATABLE
    ]
    policy = {
        "maxAttempts": _MAX_ATTEMPTS,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


def make_stubs(channel: Any, bearer: Bearer) -> dict[str, Any]:
    """A callable for each RPC, by its name, with requests as a `Call` has them and twin replies."""
    stubs = {}
    for method in wire.methods():
        response = wire.twin(method.response.DESCRIPTOR.name)
        make = channel.stream_stream if method.is_stream else channel.unary_unary
        stub = make(
            method.path,
            request_serializer=_serialize,
            response_deserializer=response.FromString,
        )
        if not method.is_stream:
            # A stream outlives the span that opens it, and its messages belong to others.
            stub = with_trace(stub)
        stubs[method.name] = bearer.on(stub, is_stream=method.is_stream)
    return stubs


def _serialize(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return data
