"""Calls on sessions: build the request, read the reply. No I/O. Pure functions."""

from __future__ import annotations

from typing import Any

from prefixcache.client.lease import Lease
from prefixcache.client.messages import Call
from prefixcache.client.results import SessionInfo, SessionPage
from prefixcache.rpc.wire import twin


def open_session(ttl_s: float, client_name: str, request_id: str) -> Call[Lease]:
    """request_id: retry key; the session of a call that got no reply is had by the same one."""
    request = twin("OpenSessionRequest")(
        ttl_s=ttl_s, client_name=client_name, request_id=request_id
    )

    def read(reply: Any) -> Lease:
        return Lease(reply.session_id, ttl_s=reply.ttl_s, boot_id=reply.boot_id)

    return Call("OpenSession", request, read)


def keep_alive(lease: Lease) -> Any:
    """The message that renews a session."""
    return twin("KeepAliveRequest")(session_id=lease.session_id)


def close_session(lease: Lease) -> Any:
    return twin("CloseSessionRequest")(session_id=lease.session_id)


def list_sessions(page_token: str) -> Call[SessionPage]:
    """The page after the one that gave `page_token`; the first for an empty one."""
    request = twin("ListSessionsRequest")(page_size=1000, page_token=page_token)
    return Call("ListSessions", request, _read_page)


def _read_page(reply: Any) -> SessionPage:
    return SessionPage(
        sessions=tuple(
            SessionInfo(
                owner_digest=info.owner_digest,
                client_name=info.client_name,
                ttl_s=info.ttl_s,
                left_s=info.left_s,
                is_connected=info.is_connected,
                num_sequences=info.num_sequences,
                age_s=info.age_s,
                tenant=info.tenant,
            )
            for info in reply.sessions
        ),
        next_page_token=reply.next_page_token,
    )
