"""A client's right to use the pool's memory itself, and whether it still holds.

An attachment is of one session and one connection to the peer socket. It owns that connection, and
the flag by which the daemon says that the session lives. It maps nothing (see
`prefixcache.attached`). `check` costs a few microseconds, and may be called from many threads.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from prefixcache.address import Address, UnixAddress
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.lease import Lease
from prefixcache.client.peer_connection import PeerAnswer, PeerConnection, PeerRefusedError
from prefixcache.client.results import ServerInfo
from prefixcache.errors import (
    AttachDeniedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NoStorageError,
    PrefixCacheError,
    UnavailableError,
)
from prefixcache.rpc._pb import attach_pb2
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.rpc.status import from_status_message
from prefixcache.storage.layout import Layout
from prefixcache.storage.life_flag import LifeReader


@dataclass(frozen=True, slots=True)
class AttachTerms:
    """What a client has to show. token: of its calls; empty without."""

    info: ServerInfo
    lease: Lease
    home: HomeProcess
    address: Address | None
    token: str


class Attachment:
    """Made by `request_attachment`.

    pool_fd: of the pool's memory, to be closed by whoever maps it; None on a GPU. description: of
    the memory. layout: of its blocks.
    """

    def __init__(
        self,
        terms: AttachTerms,
        layout: Layout,
        connection: PeerConnection,
        description: attach_pb2.AttachResponse,
        descriptors: tuple[int, ...],
        *,
        is_writable: bool,
    ) -> None:
        self.layout = layout
        self.is_writable = is_writable
        self.info = terms.info
        self.lease = terms.lease
        self.description = description
        self.pool_fd = descriptors[0] if len(descriptors) > 1 else None
        self._home = terms.home
        self._connection = connection
        self._life = LifeReader(descriptors[-1])

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return self._home.is_here

    @property
    def holds(self) -> bool:
        return (
            self._home.is_here
            and not self.lease.is_lost
            and self._life.is_set
            and self._connection.is_open
        )

    def check(self) -> None:
        """Raises SessionLostError once the session, or the daemon, has ended.

        Raises ForkedClientError in a child.
        """
        self.check_session()
        self.check_daemon()

    def check_daemon(self) -> None:
        """Raises SessionLostError once the daemon has ended. Of no meaning in a child."""
        if not self._connection.is_open:
            self.lease.lose("the daemon has ended, or has cut the connection")
            self.lease.check()

    def check_session(self) -> None:
        """`check`, without the daemon, which gives no blocks to others once it has ended.

        It gives them only after this raises: what was computed over blocks of the session before a
        check that passes is right.
        """
        self._home.check()
        if not self._life.is_set:
            self.lease.lose("the daemon has ended it")
        self.lease.check()

    def end(self) -> None:
        """Nothing in this process reads or writes there any more. Does nothing in a child."""
        if self._home.is_here:
            with suppress(OSError):
                self._connection.ask(PeerMessage.DETACH)
            self._connection.close()


def request_attachment(terms: AttachTerms, *, writable: bool) -> Attachment:
    """Ask the daemon for its memory: for a second at most.

    Raises NoStorageError, AttachDeniedError, SessionLostError, UnauthenticatedError,
    UnavailableError, FailedPreconditionError for a process that the daemon cannot watch, or
    InvalidArgumentError for a client without a session or not on a Unix socket.
    """
    info, lease = terms.info, terms.lease
    if info.layout is None:
        raise NoStorageError
    if not lease.is_session:
        raise InvalidArgumentError("session_ttl_s", "is None; only sessions can be attached")
    if not isinstance(terms.address, UnixAddress):
        raise InvalidArgumentError("target", "must be a Unix socket: memory is given to no other")
    if "attach" not in info.capabilities:
        raise AttachDeniedError("write" if writable else "read")
    request = attach_pb2.AttachRequest(session_id=lease.owner, writable=writable, token=terms.token)
    connection, answer = _ask(terms.address, request.SerializeToString())
    try:
        description = _description(answer, terms)
        found = Attachment(
            terms,
            info.layout,
            connection,
            description,
            answer.descriptors,
            is_writable=writable,
        )
    except (PrefixCacheError, OSError):
        connection.close()
        for descriptor in answer.descriptors:
            os.close(descriptor)
        raise
    os.close(answer.descriptors[-1])
    return found


def _ask(address: UnixAddress, request: bytes) -> tuple[PeerConnection, PeerAnswer]:
    try:
        connection = PeerConnection(address)
    except OSError as error:
        raise UnavailableError(f"no peer socket beside {address.path}: {error}") from error
    try:
        return connection, connection.ask(PeerMessage.ATTACH, request)
    except PeerRefusedError as error:
        connection.close()
        raise FailedPreconditionError(f"the daemon gives no memory: {error}") from error
    except OSError as error:
        connection.close()
        raise UnavailableError(f"the daemon does not answer: {error}") from error


def _description(answer: PeerAnswer, terms: AttachTerms) -> attach_pb2.AttachResponse:
    """Checked: what follows may rely on it."""
    description = attach_pb2.AttachResponse.FromString(answer.rest)
    if description.refusal:
        raise terms.lease.failed(from_status_message(description.refusal))
    terms.lease.answered_by(description.boot_id)
    terms.lease.check()
    num_wanted = 1 if description.HasField("cuda") else 2
    if len(answer.descriptors) != num_wanted:
        raise UnavailableError("the daemon's answer came without its memory")
    return description
