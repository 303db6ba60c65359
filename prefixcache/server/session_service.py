"""SessionService: leases for clients. Safe to call from many threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from prefixcache.errors import DrainingError, InvalidArgumentError
from prefixcache.rpc._pb import session_pb2
from prefixcache.server import checks
from prefixcache.server.callers import Caller
from prefixcache.server.daemon import Daemon
from prefixcache.server.keep_alive import Beat, KeepAliveStreams

MAX_CLIENT_NAME_BYTES = 128
MIN_TTL_S = 1.0


class SessionService:
    def __init__(self, daemon: Daemon, keep_alives: KeepAliveStreams) -> None:
        self._daemon = daemon
        self._sequences = daemon.sequences
        self._keep_alives = keep_alives

    def open_session(
        self, request: session_pb2.OpenSessionRequest, caller: Caller
    ) -> session_pb2.OpenSessionResponse:
        longest_s = self._daemon.info.limits.max_session_ttl_s
        if not MIN_TTL_S <= request.ttl_s <= longest_s:
            raise InvalidArgumentError(
                "ttl_s", f"is {request.ttl_s:g}, must be {MIN_TTL_S:g} to {longest_s:g}"
            )
        if len(request.client_name.encode()) > MAX_CLIENT_NAME_BYTES:
            raise InvalidArgumentError(
                "client_name", f"is longer than {MAX_CLIENT_NAME_BYTES} bytes"
            )
        request_id = checks.request_id(request.request_id)
        if self._daemon.is_draining:
            raise DrainingError
        with self._sequences.lock:
            session = self._sequences.live.sessions.open(
                request.ttl_s, request.client_name, request_id, caller.tenant
            )
        return session_pb2.OpenSessionResponse(
            session_id=session.lease_id, ttl_s=session.ttl_s, boot_id=self._daemon.boot_id
        )

    def open_keep_alive(
        self, cancel: Callable[[], object], caller: Caller
    ) -> AbstractContextManager[Beat]:
        return self._keep_alives.opened(cancel, caller)

    def close_session(
        self, request: session_pb2.CloseSessionRequest, caller: Caller
    ) -> session_pb2.CloseSessionResponse:
        session_id = checks.session_id(request.session_id, caller)
        with self._sequences.lock:
            num_sequences = self._sequences.live.close_session(session_id)
        return session_pb2.CloseSessionResponse(num_sequences=num_sequences)
