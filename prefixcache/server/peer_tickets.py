"""Tickets for users of this host: what a process on the peer socket is known by in calls.

gRPC does not tell a server who is at the other end of a Unix socket; the peer socket does. A
process asks there for a ticket, random text which it then sends as the bearer token of its calls.
A ticket is good for as long as that connection is open, so it ends with the process. A request
(TICKET) is empty, and its answer is the ticket.
"""

from __future__ import annotations

import secrets

from prefixcache.server.auth_file import token_hash
from prefixcache.server.peer_process import Peer
from prefixcache.server.peer_socket import (
    PeerAnswer,
    PeerConnection,
    PeerRefusedError,
    PeerRequest,
)


class PeerTickets:
    """The tickets that a daemon has given out. `peer_with` may be called from any thread."""

    def __init__(self) -> None:
        self._tickets: dict[PeerConnection, str] = {}
        self._by_digest: dict[bytes, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def peer_with(self, digest: bytes) -> Peer | None:
        """Who holds the ticket of that SHA-256 now."""
        return self._by_digest.get(digest)

    def give(self, connection: PeerConnection, request: PeerRequest) -> PeerAnswer:
        """The handler of TICKET. Asking again gives the same one."""
        if request.rest:
            raise PeerRefusedError("a request for a ticket has nothing in it")
        ticket = self._tickets.get(connection)
        if ticket is None:
            ticket = secrets.token_urlsafe(32)
            self._tickets[connection] = ticket
            self._by_digest[token_hash(ticket)] = connection.peer
            connection.on_end(lambda: self._take_back(connection))
        return PeerAnswer(ticket.encode())

    def _take_back(self, connection: PeerConnection) -> None:
        del self._by_digest[token_hash(self._tickets.pop(connection))]
