"""A gRPC server that answers what a test tells it to, and keeps what it was asked."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from prefixcache.errors import PrefixCacheError
from prefixcache.rpc import wire
from prefixcache.rpc._pb import cache_pb2, session_pb2
from prefixcache.rpc.status import to_status

BOOT_ID = bytes(range(16))
SESSION_ID = bytes(range(24))
FINGERPRINT = bytes(range(32))
BLOCK_SIZE = 4
NUM_LAYERS = 2

HANG = object()
"""An outcome: no answer until the caller has gone."""
END = object()
"""An outcome of a stream's message: the stream ends well, without an answer."""

Answer = Callable[[bytes, grpc.ServicerContext], Any]


def info_reply(**changes: Any) -> cache_pb2.GetServerInfoResponse:
    fields = {
        "api_version": "v1",
        "server_version": "9.9.9",
        "boot_id": BOOT_ID,
        "layout": cache_pb2.KVLayout(
            num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=8, dtype="float32", block_bytes=2048
        ),
        "layout_fingerprint": FINGERPRINT,
        "num_blocks": 100,
        "block_size": BLOCK_SIZE,
        "device": "cpu",
        "hash_algorithm": "sha256_cbor",
        "hash_recipe_version": 1,
        "limits": cache_pb2.Limits(
            max_message_bytes=2**28, max_fork_children=256, max_step_allocates=3
        ),
        "capabilities": ["attention"],
        "owner_ttl_s": 600.0,
        "core": "native",
    }
    return cache_pb2.GetServerInfoResponse(**(fields | changes))


def allocated(sequence_id: int = 7, cached: int = 0, blocks: tuple[int, ...] = ()) -> Any:
    return cache_pb2.AllocateResponse(
        sequence_id=sequence_id, num_cached_tokens=cached, block_ids=blocks
    )


class FakeDaemon:
    """Answers each method's outcomes in turn: a reply, an error, a status code, HANG, a function.

    Each message of a stream has an outcome of its own. Without outcomes left it answers
    GetServerInfo, frees every sequence, gives `q` back as `out`, and replies empty to the rest.
    Requests are read as declared, as the daemon does.
    """

    def __init__(self, server: grpc.Server) -> None:
        self._server = server
        self.target = ""
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.raw: dict[str, list[bytes]] = defaultdict(list)
        self.deadlines_s: dict[str, list[float]] = defaultdict(list)
        self._outcomes: dict[str, deque[Any]] = defaultdict(deque)
        for method in wire.methods():
            answer = self._answer(method)
            handler = (
                grpc.stream_stream_rpc_method_handler(_each(answer), response_serializer=_bytes)
                if method.is_stream
                else grpc.unary_unary_rpc_method_handler(answer, response_serializer=_bytes)
            )
            server.add_registered_method_handlers(method.service, {method.name: handler})

    def will(self, method: str, *outcomes: Any) -> None:
        self._outcomes[method].extend(outcomes)

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _answer(self, method: wire.Method) -> Answer:
        def handle(data: bytes, context: grpc.ServicerContext) -> Any:
            request = method.request.FromString(data)
            self.raw[method.name].append(data)
            self.requests[method.name].append(request)
            self.deadlines_s[method.name].append(context.time_remaining())
            outcomes = self._outcomes[method.name]
            outcome = outcomes.popleft() if outcomes else _default(method, request)
            if callable(outcome):
                outcome = outcome(request)
            if outcome is HANG:
                gone = threading.Event()
                if context.add_callback(gone.set):
                    gone.wait(60)
                return method.response()
            if isinstance(outcome, PrefixCacheError):
                context.abort_with_status(to_status(outcome, BOOT_ID))
            if isinstance(outcome, grpc.StatusCode):
                context.abort(outcome, "as the test wants")
            return outcome

        return handle


def _each(answer: Answer) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[Any]]:
    def handle(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        for data in messages:
            outcome = answer(data, context)
            if outcome is END:
                return
            yield outcome

    return handle


def _bytes(reply: Any) -> bytes:
    data: bytes = reply.SerializeToString()
    return data


def _default(method: wire.Method, request: Any) -> Any:
    if method.name == "GetServerInfo":
        return info_reply()
    if method.name == "OpenSession":
        return session_pb2.OpenSessionResponse(
            session_id=SESSION_ID, ttl_s=request.ttl_s, boot_id=BOOT_ID
        )
    if method.name == "KeepAlive":
        return session_pb2.KeepAliveResponse(ttl_s=60.0, boot_id=BOOT_ID)
    if method.name == "Free":
        num_rows = len(request.sequence_ids) + len(request.request_ids)
        return cache_pb2.FreeResponse(result_codes=[1] * num_rows)
    if method.name in ("Prefill", "Decode"):
        return method.response(out=request.q)
    return method.response()


@contextmanager
def fake_daemon(address: str = "127.0.0.1:0") -> Iterator[FakeDaemon]:
    """A running one; on a free port unless told an address."""
    size = 64 * 2**20
    server = grpc.server(
        ThreadPoolExecutor(8),
        options=[
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.so_reuseport", 0),
        ],
    )
    fake = FakeDaemon(server)
    port = server.add_insecure_port(address)
    fake.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    server.start()
    try:
        yield fake
    finally:
        fake.stop()
