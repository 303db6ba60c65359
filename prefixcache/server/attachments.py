"""Processes of this host that have the pool's memory mapped: who may, who does, and until when.

The handlers of ATTACH and DETACH on the peer socket (see `attach.proto` for the messages). An
attachment is of one session, whose end it is told by a flag in shared memory before any block of
the session is given away, and of one connection. A mapping cannot be taken back, so a writer counts
as long as its process lives, unless it has said that it is done; a reader counts as long as its
connection is open. Until then what a lost session had not committed is quarantined
(`prefixcache.core.quarantine`).

Handlers and callbacks run in the peer socket's thread; counts may be read from any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
from google.protobuf.message import DecodeError

from prefixcache.core.sequences import Sequences
from prefixcache.core.sessions import Session, is_session_id
from prefixcache.errors import AttachDeniedError, InvalidArgumentError, PrefixCacheError
from prefixcache.rpc._pb import attach_pb2
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.rpc.status import status_message
from prefixcache.server.access import Access
from prefixcache.server.callers import CLIENT
from prefixcache.server.peer_socket import (
    PeerAnswer,
    PeerConnection,
    PeerRefusedError,
    PeerRequest,
    PeerSocket,
)
from prefixcache.server.shared_pool import SharedPool
from prefixcache.storage.life_flag import LifeFlag
from prefixcache.types import PoolAccess

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Attachment:
    number: int
    access: PoolAccess
    session: Session
    flag: LifeFlag


class Attachments:
    """limit: what anybody may have at most."""

    def __init__(
        self, sequences: Sequences, pool: SharedPool, access: Access, limit: PoolAccess
    ) -> None:
        self._sequences = sequences
        self._pool = pool
        self._access = access
        self._limit = limit
        self._last_number = 0
        self._attached: dict[PeerConnection, _Attachment] = {}

    def serve(self, peers: PeerSocket) -> None:
        """Have requests answered there."""
        peers.answer(PeerMessage.ATTACH, self.attach)
        peers.answer(PeerMessage.DETACH, self.detach)

    def count(self, access: PoolAccess) -> int:
        """Attachments for reading, or for writing."""
        return sum(one.access is access for one in list(self._attached.values()))

    def lost_writers(self) -> list[str]:
        """Names and process ids of writers that live on without their sessions, for people."""
        sessions = self._sequences.live.sessions
        return [
            f"{one.session.client_name or 'a client'} (pid {connection.peer.pid})"
            for connection, one in list(self._attached.items())
            if one.access is PoolAccess.WRITE and one.session.session_id not in sessions
        ]

    def attach(self, connection: PeerConnection, request: PeerRequest) -> PeerAnswer:
        """The handler of ATTACH."""
        try:
            message = attach_pb2.AttachRequest.FromString(request.rest)
        except DecodeError:
            raise PeerRefusedError("what asks for memory is not an AttachRequest") from None
        if PeerMessage.ATTACH in connection.had:
            raise PeerRefusedError("this connection has, or had, an attachment")
        try:
            return self._attach(connection, message)
        except PrefixCacheError as error:
            boot_id = self._pool.description.boot_id
            status = status_message(error, boot_id).SerializeToString()
            refusal = attach_pb2.AttachResponse(refusal=status)
            return PeerAnswer(refusal.SerializeToString())

    def detach(self, connection: PeerConnection, request: PeerRequest) -> PeerAnswer:
        """The handler of DETACH: the process uses the memory no more."""
        self._end(connection)
        return PeerAnswer()

    def _attach(self, connection: PeerConnection, request: attach_pb2.AttachRequest) -> PeerAnswer:
        caller = self._access.peer_caller(connection.peer, request.token)
        caller.check_may(CLIENT)
        wanted = PoolAccess.WRITE if request.writable else PoolAccess.READ
        # What can be written to by whoever has it is for those who may.
        needed = wanted if self._pool.can_be_for_reading_only else PoolAccess.WRITE
        if min(self._limit, caller.pool_access) < needed:
            raise AttachDeniedError(needed.name.lower())
        session_id = caller.owner_key(request.session_id)
        if not is_session_id(session_id):
            raise InvalidArgumentError("session_id", "is not one of a session")
        flag = LifeFlag()
        try:
            self._begin(connection, wanted, session_id, flag)
        except (PrefixCacheError, PeerRefusedError):
            flag.close_fd()
            raise
        assert flag.fd is not None
        description = self._pool.description.SerializeToString()
        return PeerAnswer(description, [*self._pool.descriptors(wanted), flag.fd])

    def _begin(
        self, connection: PeerConnection, access: PoolAccess, session_id: bytes, flag: LifeFlag
    ) -> None:
        """Raises SessionNotFoundError, or PeerRefusedError if the process has ended."""
        end: Callable[[], None] = partial(self._end, connection)
        self._last_number += 1
        number = self._last_number
        with self._sequences.lock:
            session = self._sequences.live.sessions.renew(session_id)
            if access is PoolAccess.WRITE:
                connection.on_process_end(end)
                self._sequences.live.sessions.attach(session_id, number)
            else:
                connection.on_end(end)
            session.on_end[number] = flag.clear
        self._attached[connection] = _Attachment(number, access, session, flag)
        connection.had.add(PeerMessage.ATTACH)
        connection.on_end(flag.close_fd)

    def _end(self, connection: PeerConnection) -> None:
        """Nothing happens if it has ended before."""
        attachment = self._attached.pop(connection, None)
        if attachment is None:
            return
        attachment.flag.clear()
        connection.forget_process()
        with self._sequences.lock:
            attachment.session.on_end.pop(attachment.number, None)
            if attachment.access is PoolAccess.READ:
                return
            num_freed = self._sequences.live.end_writer(attachment.number)
        if num_freed:
            _log.info(
                "a writer without a session has ended, its blocks are free",
                client=attachment.session.client_name,
                pid=connection.peer.pid,
                blocks=num_freed,
            )
