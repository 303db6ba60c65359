"""A channel whose calls carry a bearer token, made without the code under test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from tests.support.stubs import Stubs


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _intercept(self, proceed: Any, details: Any, request: Any) -> Any:
        return proceed(_Details(details, self._metadata), request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_stream = _intercept


class _Details(grpc.ClientCallDetails):
    def __init__(self, details: Any, metadata: Any) -> None:
        self.method, self.timeout = details.method, details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


@contextmanager
def bearing(target: str, token: str) -> Iterator[Stubs]:
    """Stubs of whoever has that token."""
    with grpc.insecure_channel(target) as channel:
        yield Stubs(grpc.intercept_channel(channel, _Bearer(token)))


def hash_of(token: str) -> str:
    """`token_sha256` of a token."""
    return hashlib.sha256(token.encode()).hexdigest()
