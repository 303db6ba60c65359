"""A gRPC server that takes any bytes and returns as many as the method's name says.

What a call costs without a daemon in it: the same server, threads and options, a handler as any
that gRPC calls, no parsing and no work. Run as
`python -m prefixcache.bench.echo ADDRESS WORKERS SIZE[,SIZE...]`, until its standard input or a
signal ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from prefixcache.client.channel import DEFAULT_MAX_MESSAGE_BYTES, resolve_address
from prefixcache.server.daemon import LimitOptions
from prefixcache.server.rpc_server import make_server
from prefixcache.server.workers import Workers

_SERVICE = "prefixcache.bench.Echo"


def make_echo_server(address: str, num_workers: int, reply_sizes: Sequence[int]) -> grpc.Server:
    """Listens already, to be started."""
    server = make_server(
        Workers(num_workers, "echo"), DEFAULT_MAX_MESSAGE_BYTES, LimitOptions().max_connections
    )
    handlers: dict[str, Any] = {
        _method(size): grpc.unary_unary_rpc_method_handler(partial(_reply, bytes(size)))
        for size in set(reply_sizes)
    }
    server.add_registered_method_handlers(_SERVICE, handlers)
    server.add_insecure_port(resolve_address(address).target)
    return server


def _reply(reply: bytes, request: bytes, context: grpc.ServicerContext) -> bytes:
    return reply


def echo_stub(channel: grpc.Channel, reply_size: int) -> Callable[[bytes], bytes]:
    """What sends bytes and gets `reply_size` bytes."""
    stub: Callable[..., bytes] = channel.unary_unary(f"/{_SERVICE}/{_method(reply_size)}")
    return partial(stub, timeout=60.0)


def _method(reply_size: int) -> str:
    return f"Reply{reply_size}"


if __name__ == "__main__":
    server = make_echo_server(sys.argv[1], int(sys.argv[2]), list(map(int, sys.argv[3].split(","))))
    server.start()
    sys.stdin.read()
    server.stop(None).wait()
