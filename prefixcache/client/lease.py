"""What owns a client's sequences: a session of the daemon, or 16 bytes that the client made up.

Knows whether the session is lost, which of its calls are under way, and the requests that may have
made sequences unseen. No I/O; the keepers beat, the clients make the calls. Safe to use from many
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from prefixcache.client.lost_requests import LostRequest, LostRequests
from prefixcache.client.messages import new_owner
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    InvalidArgumentError,
    PrefixCacheError,
    SessionLostError,
    SessionNotFoundError,
)

_BEATS_A_TTL = 3


class Lease:
    """ttl_s, boot_id: of a session and of the daemon that it lives in; None for no session."""

    def __init__(
        self, owner: bytes, *, ttl_s: float | None = None, boot_id: bytes | None = None
    ) -> None:
        self.lost_requests = LostRequests(owner)
        self.ttl_s = ttl_s
        self._owner = owner
        self._boot_id = boot_id
        self.is_attached = False
        """A view computes over its sequences, or may soon (see `sequence_use`)."""
        self._cause: str | None = None
        self._lock = threading.Lock()
        self._call_numbers = count(1)
        self._waiting: dict[int, None] = {}

    @classmethod
    def without_session(cls) -> Lease:
        return cls(new_owner())

    @property
    def is_session(self) -> bool:
        return self._boot_id is not None

    @property
    def is_lost(self) -> bool:
        return self._cause is not None

    @property
    def beat_interval_s(self) -> float:
        assert self.ttl_s is not None
        return self.ttl_s / _BEATS_A_TTL

    @property
    def owner(self) -> bytes:
        """What the calls on its sequences name. Raises SessionLostError once it is lost."""
        self.check()
        return self._owner

    def check(self) -> None:
        """Raises SessionLostError once it is lost."""
        if self._cause is not None:
            raise SessionLostError(self._cause)

    @property
    def session_id(self) -> bytes:
        """`owner`, lost or not."""
        return self._owner

    def due_requests(self) -> list[LostRequest]:
        """Requests to free what they have made; none of a session that is lost."""
        return [] if self.is_lost else self.lost_requests.due()

    def begin(self, *requests: Any) -> int:
        """Number requests that are sent together in a session: old copies of them can be told.

        Each call of the caller's gets a number of its own, and its repeats by gRPC are the same
        bytes. Returns the number, for `end`.
        """
        if not self.is_session:
            return 0
        with self._lock:
            number = next(self._call_numbers)
            self._waiting[number] = None
            settled = next(iter(self._waiting)) - 1
        for request in requests:
            order = (request.batch if hasattr(request, "batch") else request).order
            order.number, order.settled = number, settled
        return number

    def end(self, number: int) -> None:
        """Nobody waits for that call any more: it was answered, or given up."""
        with self._lock:
            self._waiting.pop(number, None)

    def failed(self, error: PrefixCacheError, request_ids: Iterable[str] = ()) -> PrefixCacheError:
        """A call has failed: the error to raise.

        request_ids: retry keys that the client made up for the call, see `Call`.
        """
        if isinstance(error, SessionNotFoundError) and self.is_session:
            self._lose(str(error.fields.get("boot_id", "")), error.message)
            assert self._cause is not None
            return SessionLostError(self._cause)
        if isinstance(error, (DeadlineExceededError, CancelledCallError)):
            self.lost_requests.add(request_ids)
        return error

    def answered_by(self, boot_id: bytes) -> None:
        """A daemon of that boot has answered: no session outlives a restart."""
        if self.is_session and boot_id != self._boot_id:
            self._lose(boot_id.hex(), "")

    def lose(self, cause: str) -> None:
        """It is known to be lost, other than by a call of its own."""
        self._cause = self._cause or cause

    def _lose(self, boot_id: str, problem: str) -> None:
        assert self._boot_id is not None
        if boot_id and boot_id != self._boot_id.hex():
            problem = "the daemon was restarted"
        self.lose(problem)


def rows_by_lease(sequences: Sequence[Any], otherwise: Lease) -> dict[Lease, list[int]]:
    """The indices of the sequences of each lease; `otherwise` has none if there are none."""
    rows: dict[Lease, list[int]] = {} if sequences else {otherwise: []}
    for row, sequence in enumerate(sequences):
        rows.setdefault(sequence._lease, []).append(row)
    return rows


def owner_of(sequences: Sequence[Any], otherwise: Lease) -> Lease:
    """The lease that all of these sequences have; `otherwise` for none.

    Raises SessionLostError if the session of some is lost.
    """
    leases = list(rows_by_lease(sequences, otherwise))
    for lease in leases:
        lease.check()
    if len(leases) > 1:
        raise InvalidArgumentError("sequence_ids", "holds sequences of more than one client")
    return leases[0]
