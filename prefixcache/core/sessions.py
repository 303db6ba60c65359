"""Sessions: leases that clients hold, and when each of them ends.

A session is the owner of its sequences; its id, made here, is longer than an owner that a client
makes up, so that a call in a session that is gone is told from one of a new owner. With tenants,
owners are known here by keys that a tenant's name is mixed into (`owner_key`): whoever knows the
bytes of another tenant's owner still cannot name it. Owns the table of sessions and their times;
`LiveSequences` owns what they hold. The pattern is etcd's: a lease lives as long as it is renewed.
Guarded by the core's lock; the clock is injected.

A session ends `ttl_s` after its last beat or call, and, once a KeepAlive stream of it has broken,
`reconnect_grace_s` later unless another stream is there by then. A call renews the first of the
two only: it may have been sent before the break.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixcache.core.shares import Shares
from prefixcache.errors import (
    OvertakenError,
    RequestIdConflictError,
    SessionNotFoundError,
    StorageOwnedError,
    TooManySessionsError,
)

SESSION_ID_BYTES = 24
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """max_sequences: of one session, or of one owner without. max_owners: without a session.

    reconnect_grace_s: see the module.
    """

    max_sessions: int = 256
    max_ttl_s: float = 3600.0
    max_sequences: int = 16384
    reconnect_grace_s: float = 0.5
    max_owners: int = 4096


@dataclass(eq=False, slots=True)
class Session:
    """One lease.

    session_id: its owner key. lease_id: what its client names it by.
    stream: number of its KeepAlive stream; None if there is none now.
    broken_at_s: when its last stream broke; None while one is there, and before the first one.
    settled: its client waits for no call of this number or a lower one any more.
    attachments: whose processes may write to the blocks of its sequences themselves.
    writes_itself: some process has, or had, such an attachment.
    on_end: called when it ends, before anything that it holds is given back; neither raises nor
    waits. Keys are those of who wants to be told.
    """

    session_id: bytes
    lease_id: bytes
    tenant: str
    serial: int
    client_name: str
    ttl_s: float
    request_id: str
    opened_at_s: float
    expires_at_s: float
    stream: int | None = None
    broken_at_s: float | None = None
    settled: int = 0
    attachments: set[int] = field(default_factory=set)
    writes_itself: bool = False
    on_end: dict[int, Callable[[], None]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return owner_digest(self.session_id)


class CallOrder(NamedTuple):
    """The number of a call in a session, and up to where its client waits for none any more.

    Where a sequence stands does not tell an old copy of a call once the sequence is back where it
    was, after Truncate or drafts; nor does a retry key once its sequence is freed, or was refused.
    What was settled can be told in both cases. The idea is RIFL's (Lee et al., SOSP 2015).
    """

    number: int
    settled: int


def owner_key(tenant: str, owner: bytes) -> bytes:
    """What the owner that a tenant's client names is known by: as long, and nobody else's.

    tenant: empty without access control; then it is the owner itself.
    """
    if not tenant:
        return owner
    return hashlib.sha256(owner + tenant.encode()).digest()[: len(owner)]


def is_session_id(owner: bytes) -> bool:
    return len(owner) == SESSION_ID_BYTES


def owner_digest(owner: bytes) -> str:
    """What operators see of an owner: equal for one owner, and no key to its sequences."""
    return hashlib.sha256(owner).hexdigest()[:_DIGEST_CHARS]


class Sessions:
    """All sessions that have not ended, by id, in the order in which they were opened.

    shares: of the sessions that there may be, by tenant.
    """

    def __init__(self, limits: SessionLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self.shares = Shares(limits.max_sessions)
        self._by_id: dict[bytes, Session] = {}
        self._by_request_id: dict[tuple[str, str], Session] = {}
        self._last_serial = 0
        self._last_stream = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def __contains__(self, session_id: bytes) -> bool:
        return session_id in self._by_id

    def open(
        self, ttl_s: float, client_name: str, request_id: str = "", tenant: str = ""
    ) -> Session:
        """A new session, or the one that a request with this retry key has opened.

        Raises TooManySessionsError, or RequestIdConflictError if that one has another TTL or name.
        """
        earlier = self._by_request_id.get((tenant, request_id))
        if earlier is not None:
            if (earlier.ttl_s, earlier.client_name) != (ttl_s, client_name):
                raise RequestIdConflictError(request_id)
            return self.renew(earlier.session_id)
        if not self.shares.has_place(tenant):
            raise TooManySessionsError(self.limits.max_sessions)
        now = self._clock()
        self._last_serial += 1
        lease_id = secrets.token_bytes(SESSION_ID_BYTES)
        session = Session(
            session_id=owner_key(tenant, lease_id),
            lease_id=lease_id,
            tenant=tenant,
            serial=self._last_serial,
            client_name=client_name,
            ttl_s=ttl_s,
            request_id=request_id,
            opened_at_s=now,
            expires_at_s=now + ttl_s,
        )
        self._by_id[session.session_id] = session
        self.shares.add(tenant)
        if request_id:
            self._by_request_id[tenant, request_id] = session
        return session

    def find(self, session_id: bytes) -> Session:
        """Raises SessionNotFoundError."""
        session = self._by_id.get(session_id)
        if session is None:
            raise SessionNotFoundError(owner_digest(session_id))
        return session

    def renew(self, session_id: bytes) -> Session:
        """Give a session its whole TTL again. Raises SessionNotFoundError."""
        session = self.find(session_id)
        session.expires_at_s = self._clock() + session.ttl_s
        return session

    def take_turn(self, session_id: bytes, order: CallOrder) -> None:
        """A call has come, and may go on. Raises OvertakenError, or SessionNotFoundError."""
        session = self.find(session_id)
        if order.number <= session.settled:
            raise OvertakenError(order.number, session.settled)
        session.settled = max(session.settled, order.settled)

    def attach(self, session_id: bytes, attachment: int) -> None:
        """The process behind an attachment may write to a session's blocks itself, from now on.

        If the session then ends, unasked or closed, its blocks that were not committed are
        quarantined until `LiveSequences.end_writer` of all its attachments: some thread of the
        process may be in the middle of a write. A client that frees or cuts a sequence has stopped
        writing to it before it says so, and one that detaches before it closes the session has
        altogether: that quarantines nothing.

        attachment: a number of the caller's, for one process, that it never uses again; may be
        attached to many sessions. Raises SessionNotFoundError.
        """
        session = self.renew(session_id)
        session.attachments.add(attachment)
        session.writes_itself = True

    def check_writes_itself(self, owner: bytes) -> None:
        """Its client has, or had, an attachment: only then does it know what is in the blocks.

        Raises StorageOwnedError, or SessionNotFoundError for a session that has ended.
        """
        if not is_session_id(owner) or not self.find(owner).writes_itself:
            raise StorageOwnedError

    def connect(self, session_id: bytes) -> int:
        """A KeepAlive stream of the session is there, in place of any other; its number.

        Raises SessionNotFoundError.
        """
        session = self.renew(session_id)
        self._last_stream += 1
        session.stream = self._last_stream
        session.broken_at_s = None
        return self._last_stream

    def is_connected(self, session_id: bytes, stream: int) -> bool:
        """The session has not ended, and no other stream has taken this one's place."""
        session = self._by_id.get(session_id)
        return session is not None and session.stream == stream

    def disconnect(self, session_id: bytes, stream: int) -> None:
        """The stream has broken. Nothing happens if another one has taken its place."""
        if self.is_connected(session_id, stream):
            session = self._by_id[session_id]
            session.stream = None
            session.broken_at_s = self._clock()

    def remove(self, session: Session) -> None:
        for told in session.on_end.values():
            told()
        del self._by_id[session.session_id]
        self.shares.remove(session.tenant)
        if session.request_id:
            del self._by_request_id[session.tenant, session.request_id]

    def expired(self) -> list[Session]:
        """Those whose time is over now."""
        now = self._clock()
        return [session for session in self if self._ends_at_s(session) <= now]

    def postpone(self, seconds: float) -> None:
        """Let every session end so much later: the daemon itself stood still meanwhile."""
        for session in self:
            session.expires_at_s += seconds
            if session.broken_at_s is not None:
                session.broken_at_s += seconds

    def seconds_left(self, session: Session) -> float:
        """Until it ends if nothing is heard of it, at least 0."""
        return max(0.0, self._ends_at_s(session) - self._clock())

    def _ends_at_s(self, session: Session) -> float:
        if session.broken_at_s is None:
            return session.expires_at_s
        return min(session.expires_at_s, session.broken_at_s + self.limits.reconnect_grace_s)
