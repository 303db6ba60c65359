"""Who lives: the table of sequences, which owner may name which, and when they end.

An owner is a session, which `Sessions` lets live and end, or 16 bytes that a client made up, which
lives as long as it makes calls. Owns the ids, the owner table and the sequences that have ended
while a call was still running on them. Changes no tokens and no blocks but for giving back those of
a sequence that has ended. Guarded by the core's lock; the clock is injected.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from prefixcache.core import growth
from prefixcache.core.pending import PendingBlocks
from prefixcache.core.pool import Pool
from prefixcache.core.quarantine import Quarantine
from prefixcache.core.sequence import Sequence
from prefixcache.core.sessions import (
    SESSION_ID_BYTES,
    CallOrder,
    Session,
    SessionLimits,
    Sessions,
    is_session_id,
)
from prefixcache.core.shares import Shares
from prefixcache.errors import (
    SequenceBusyError,
    SequenceNotFoundError,
    TooManyOwnersError,
    TooManySequencesError,
)
from prefixcache.types import SequenceId

_IDS_AT_ONCE = 64
"""Random ids that are made together: the call of the system costs as much as the rest."""


class Held(NamedTuple):
    """Blocks in the tables of an owner's sequences; what they share counts once for each."""

    owner: bytes
    num_blocks: int


@dataclass(eq=False, slots=True)
class _Owner:
    """account: of its tenant, when its first sequence was made."""

    account: int
    last_call_s: float
    sequences: dict[int, Sequence] = field(default_factory=dict)
    requests: dict[str, Sequence] = field(default_factory=dict)


class LiveSequences:
    """Sequences by id, and by owner. An owner is in its table as long as it has sequences.

    Owners that are no sessions stand in the order of their last calls, so expiry looks only at the
    oldest.
    """

    def __init__(
        self,
        pool: Pool,
        pending: PendingBlocks,
        owner_ttl_s: float,
        clock: Callable[[], float],
        session_limits: SessionLimits,
    ) -> None:
        self.sessions = Sessions(session_limits, clock)
        self.quarantine = Quarantine(pool)
        self._pool = pool
        self._pending = pending
        self._owner_ttl_s = owner_ttl_s
        self._clock = clock
        self.by_id: dict[int, Sequence] = {}
        self._dying: dict[int, Sequence] = {}
        self._owners: dict[bytes, _Owner] = {}
        self._owner_shares = Shares(session_limits.max_owners)
        self._session_owners: dict[bytes, _Owner] = {}
        self._last_serial = 0
        self._spare_ids = array("Q")

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def num_owners(self) -> int:
        return len(self._owners) + len(self._session_owners)

    def num_sequences_of(self, owner: bytes) -> int:
        record = self._owners_like(owner).get(owner)
        return len(record.sequences) if record is not None else 0

    def all_holders(self) -> Iterator[Sequence]:
        """Everything that holds blocks: live sequences, and ended ones with a running call."""
        return chain(self.by_id.values(), self._dying.values())

    def touch(self, owner: bytes) -> Mapping[str, Sequence]:
        """Renew an owner's time; its sequences by request id, in a view that stays current.

        Every call on sequences comes by here first. Raises SessionNotFoundError for a session that
        has ended; an owner that is no session need not be known.
        """
        if is_session_id(owner):
            self.sessions.renew(owner)
            record = self._session_owners.get(owner)
            return record.requests if record is not None else {}
        record = self._owners.pop(owner, None)
        if record is None:
            return {}
        record.last_call_s = self._clock()
        self._owners[owner] = record
        return record.requests

    def take_turn(self, owner: bytes, order: CallOrder | None) -> None:
        """Of a call in a session: raises OvertakenError if it is an old copy.

        order: None of a client that numbers no calls. Goes ahead of the call, under one lock.
        """
        if order is not None and is_session_id(owner):
            self.sessions.take_turn(owner, order)

    def call_ended(self, owner: bytes) -> None:
        """`touch`, for an owner that may have ended while its call was running."""
        if not is_session_id(owner) or owner in self.sessions:
            self.touch(owner)

    def share_among(self, tenants: Mapping[str, int]) -> None:
        """Each of these can always have its share of sessions and owners. tenants: accounts."""
        self.sessions.shares.share_among(tenants)
        self._owner_shares.share_among(tenants.values())

    def check_can_add(self, owner: bytes, count: int, account: int) -> None:
        """Raises TooManySequencesError or TooManyOwnersError beyond what one, or all, may have."""
        limits = self.sessions.limits
        owners = self._owners_like(owner)
        record = owners.get(owner)
        held = len(record.sequences) if record is not None else 0
        if held + count > limits.max_sequences:
            raise TooManySequencesError(limits.max_sequences)
        is_new = record is None and owners is self._owners
        if is_new and not self._owner_shares.has_place(account):
            raise TooManyOwnersError(limits.max_owners)

    def get(self, owner: bytes, sequence_id: int) -> Sequence | None:
        """None also for a sequence of another owner."""
        sequence = self.by_id.get(sequence_id)
        return sequence if sequence is not None and sequence.owner == owner else None

    def find(self, owner: bytes, sequence_id: int) -> Sequence:
        """`get`, and raise SequenceNotFoundError for None."""
        sequence = self.get(owner, sequence_id)
        if sequence is None:
            raise SequenceNotFoundError(sequence_id)
        return sequence

    def idle(self, owner: bytes, sequence_id: int) -> Sequence:
        """`find`, and raise SequenceBusyError while a call is running on it."""
        sequence = self.find(owner, sequence_id)
        if sequence.is_busy:
            raise SequenceBusyError(sequence_id)
        return sequence

    def is_alive(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.by_id

    def is_known(self, sequence_id: int) -> bool:
        """True also for one that has ended while a call on it is running."""
        return sequence_id in self.by_id or sequence_id in self._dying

    def add(self, sequence: Sequence) -> None:
        """It lives from now on, under an id of its own."""
        self._last_serial += 1
        sequence.sequence_id, sequence.serial = self._new_id(), self._last_serial
        owners = self._owners_like(sequence.owner)
        owner = owners.get(sequence.owner)
        if owner is None:
            owner = owners[sequence.owner] = _Owner(sequence.account, self._clock())
            if owners is self._owners:
                self._owner_shares.add(owner.account)
        owner.sequences[sequence.sequence_id] = sequence
        if sequence.request_id:
            owner.requests[sequence.request_id] = sequence
        self.by_id[sequence.sequence_id] = sequence

    def end(self, sequence: Sequence) -> None:
        """The id is dead at once; the blocks go now, or when the running call has ended."""
        del self.by_id[sequence.sequence_id]
        owners = self._owners_like(sequence.owner)
        owner = owners[sequence.owner]
        del owner.sequences[sequence.sequence_id]
        if sequence.request_id:
            del owner.requests[sequence.request_id]
        if not owner.sequences:
            del owners[sequence.owner]
            if owners is self._owners:
                self._owner_shares.remove(owner.account)
        self._dying[sequence.sequence_id] = sequence
        self._pending.end(sequence)
        self.bury_if_idle(sequence)

    def close_session(self, session_id: bytes) -> int:
        """`end_session` for an id. Raises SessionNotFoundError."""
        return self.end_session(self.sessions.find(session_id))

    def end_session(self, session: Session) -> int:
        """End a session and its sequences, those with a running call too; returns how many."""
        self.sessions.remove(session)
        record = self._session_owners.get(session.session_id)
        sequences = list(record.sequences.values()) if record is not None else []
        for sequence in sequences:
            sequence.writers = session.attachments
            self.end(sequence)
        self._pending.wake_owner(session.session_id)
        return len(sequences)

    def end_writer(self, attachment: int) -> int:
        """The process behind an attachment has ended, or has no mapping any more.

        Frees what it alone could still write to, and returns how many blocks that are. Live
        sessions of the attachment go on without it. One that is not known is no error.
        """
        for session in self.sessions:
            session.attachments.discard(attachment)
        for sequence in self._dying.values():
            if sequence.writers is not None:
                sequence.writers.discard(attachment)
        return self.quarantine.end_writer(attachment)

    def bury_if_idle(self, sequence: Sequence) -> None:
        """Give back the blocks of an ended sequence once no call runs on it."""
        if sequence.sequence_id in self._dying and not sequence.is_busy:
            del self._dying[sequence.sequence_id]
            if sequence.writers:
                self.quarantine.give_back(sequence, sequence.writers)
            else:
                growth.release_all(self._pool, sequence)

    def expired(self) -> list[Sequence]:
        """Sequences of owners that made no call for the TTL and have none running; no sessions'."""
        limit = self._clock() - self._owner_ttl_s
        found: list[Sequence] = []
        for name, owner in self._owners.items():
            if owner.last_call_s > limit:
                break
            is_busy = any(sequence.is_busy for sequence in owner.sequences.values())
            if not is_busy and not self._pending.has_waiter_of(name):
                found.extend(owner.sequences.values())
        return found

    def table_lengths(self, account: int) -> Iterator[Held]:
        """Of each owner of an account, how many blocks the tables of its sequences have."""
        for owner, record in chain(self._owners.items(), self._session_owners.items()):
            if record.account == account:
                sequences = record.sequences.values()
                tables = [len(sequence.block_table) for sequence in sequences]
                yield Held(owner, sum(tables))

    def client_name(self, owner: bytes) -> str:
        """Of a live owner; empty for one without a session."""
        return self.sessions.find(owner).client_name if is_session_id(owner) else ""

    def _owners_like(self, owner: bytes) -> dict[bytes, _Owner]:
        return self._session_owners if len(owner) == SESSION_ID_BYTES else self._owners

    def _new_id(self) -> SequenceId:
        while True:
            if not self._spare_ids:
                self._spare_ids = array("Q", os.urandom(8 * _IDS_AT_ONCE))
            sequence_id = self._spare_ids.pop()
            if sequence_id and sequence_id not in self.by_id and sequence_id not in self._dying:
                return SequenceId(sequence_id)
