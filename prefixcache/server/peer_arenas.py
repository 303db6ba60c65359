"""Requests of the peer socket for arenas.

A request (ARENA) comes with one descriptor, of a memfd that is sealed against shrinking; its rest
is the token that the client's calls carry, empty for none. The answer is the arena's number, 8
bytes, big-endian. A connection has one arena, which ends with it.
"""

from __future__ import annotations

from prefixcache.errors import PrefixCacheError
from prefixcache.rpc.peer_protocol import ARENA_ID, PeerMessage
from prefixcache.server.access import Access
from prefixcache.server.arenas import Arenas
from prefixcache.server.callers import CLIENT
from prefixcache.server.peer_socket import (
    PeerAnswer,
    PeerConnection,
    PeerRefusedError,
    PeerRequest,
    PeerSocket,
)


class ArenaRequests:
    """access: says whose an arena is."""

    def __init__(self, arenas: Arenas, access: Access) -> None:
        self._arenas, self._access = arenas, access

    def serve(self, peers: PeerSocket) -> None:
        """Have requests answered there, if the daemon takes arenas."""
        if self._arenas.max_bytes:
            peers.answer(PeerMessage.ARENA, self.register)

    def register(self, connection: PeerConnection, request: PeerRequest) -> PeerAnswer:
        """The handler of ARENA."""
        if len(request.descriptors) != 1:
            raise PeerRefusedError("an arena is one descriptor")
        if PeerMessage.ARENA in connection.had:
            raise PeerRefusedError("this connection has an arena")
        try:
            token = request.rest.decode(errors="replace")
            caller = self._access.peer_caller(connection.peer, token)
            caller.check_may(CLIENT)
            arena_id = self._arenas.add(
                request.descriptors[0],
                caller.tenant,
                connection.peer.uid,
                self._access.tenants(),
            )
        except PrefixCacheError as error:
            raise PeerRefusedError(str(error)) from None
        connection.had.add(PeerMessage.ARENA)
        connection.on_end(lambda: self._arenas.remove(arena_id))
        return PeerAnswer(ARENA_ID.pack(arena_id))
