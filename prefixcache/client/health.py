"""Whether a daemon serves, by gRPC's own protocol for that (grpc.health.v1)."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.client.channel import DEFAULT_TIMEOUT_S, channel_options, resolve_address
from prefixcache.client.credentials import NO_CREDENTIALS, Credentials, make_channel
from prefixcache.rpc.status import from_rpc_error

SERVING = "SERVING"


def check_health(
    target: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    credentials: Credentials = NO_CREDENTIALS,
) -> str:
    """`SERVING`, or `NOT_SERVING` while the daemon drains. Needs no token: only TLS, if any.

    Raises UnavailableError and DeadlineExceededError.
    """
    address = resolve_address(target)
    with make_channel(
        grpc, address, Credentials(tls=credentials.tls), channel_options()
    ) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # set by gRPC
            reply = check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
