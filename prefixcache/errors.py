"""The one error tree, shared by core, server and clients.

PrefixCacheError
├── InvalidArgumentError            a field has a bad value; `field` names it
│   └── ExceedsPoolError            more blocks than the whole pool has: never retry
├── NotFoundError
│   ├── SequenceNotFoundError       unknown, freed, expired, or another owner's
│   ├── SessionNotFoundError        closed, expired, or from before a restart
│   └── SessionLostError            a client's: the session of these sequences is gone, and they are
├── AlreadyExistsError
│   └── RequestIdConflictError      request_id was used for other content
├── FailedPreconditionError
│   ├── WrongPositionError          the call does not continue where the sequence stands
│   ├── OvertakenError              an old copy of a call that its client has done with
│   ├── BeyondTokensError     more tokens committed, or run, than the sequence has room for
│   ├── NotComputedError            Fork of a sequence with tokens still to compute
│   ├── EventsOffError              WatchEvents on a daemon that keeps no events
│   ├── BlocksInUseError            reset without force while blocks are referenced
│   ├── FingerprintMismatchError    the client was built for another layout or model
│   ├── ForkedClientError           the client belongs to the process that this one was forked from
│   ├── ReadOnlyViewError           a client's: its view of the pool is for reading only
│   ├── NoStorageError              Prefill or Decode on a daemon without K/V memory
│   ├── ArenaLostError              tensors by reference where the caller has no arena any more
│   └── StorageOwnedError           Commit to a daemon with K/V memory, by who is not attached to it
├── OutOfRangeError
│   └── EventsGoneError             events from that number on are not there, or not any more
├── ResourceExhaustedError
│   ├── NoRoomError                 too few free blocks now; retry after some are freed
│   ├── QuotaExceededError          the tenant would hold more blocks than it may
│   ├── TooManyStreamsError         the daemon serves no more streams of this kind
│   ├── TooManySessionsError        the daemon has as many sessions as it takes
│   ├── TooManyOwnersError          as many clients without a session have sequences as may
│   ├── TooManySequencesError       the session, or owner, has as many sequences as one may have
│   ├── TooManyCallsError           as many calls wait for a thread as may; retry later
│   └── WaitedTooLongError          the call has waited for a thread as long as one may
├── AbortedError
│   └── SequenceBusyError           a call is running on the sequence
├── UnauthenticatedError            no credentials, or none that the daemon knows
├── PermissionDeniedError           the caller's role does not admit the call
│   └── AttachDeniedError           the caller may not have the pool's memory itself
├── UnavailableError                the daemon cannot be reached
│   └── DrainingError               the daemon is stopping
├── DeadlineExceededError
├── CancelledCallError
└── InternalError                   a bug of ours

A class's `reason` is its name on the wire (google.rpc.ErrorInfo.reason) and `fields` are the
numbers and names that belong to it. `prefixcache.rpc.status` maps classes to gRPC status codes.
Importing this module imports nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from prefixcache.types import BlockHolder

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "ArenaLostError",
    "AttachDeniedError",
    "BeyondTokensError",
    "BlocksInUseError",
    "CancelledCallError",
    "DeadlineExceededError",
    "DrainingError",
    "EventsGoneError",
    "EventsOffError",
    "ExceedsPoolError",
    "FailedPreconditionError",
    "FingerprintMismatchError",
    "ForkedClientError",
    "InternalError",
    "InvalidArgumentError",
    "NoRoomError",
    "NoStorageError",
    "NotComputedError",
    "NotFoundError",
    "OutOfRangeError",
    "OvertakenError",
    "PermissionDeniedError",
    "PrefixCacheError",
    "QuotaExceededError",
    "ReadOnlyViewError",
    "RequestIdConflictError",
    "ResourceExhaustedError",
    "SequenceBusyError",
    "SequenceNotFoundError",
    "SessionLostError",
    "SessionNotFoundError",
    "StorageOwnedError",
    "TooManyCallsError",
    "TooManyOwnersError",
    "TooManySequencesError",
    "TooManySessionsError",
    "TooManyStreamsError",
    "UnauthenticatedError",
    "UnavailableError",
    "WaitedTooLongError",
    "WrongPositionError",
]


class PrefixCacheError(Exception):
    """Base of every error of this package.

    `fields` holds what a program needs to react (numbers, names), as str or int; over the wire
    all of them arrive as str.
    """

    reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, fields: dict[str, str | int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, str | int] = fields or {}

    @classmethod
    def from_wire(cls, message: str, fields: dict[str, str | int]) -> Self:
        """Rebuild an error on the client, without the constructor of its class."""
        error = cls.__new__(cls)
        PrefixCacheError.__init__(error, message, fields)
        return error


class InvalidArgumentError(PrefixCacheError):
    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str, **numbers: str | int) -> None:
        super().__init__(f"{field}: {problem}", {"field": field, **numbers})

    @property
    def field(self) -> str:
        return str(self.fields.get("field", ""))


class ExceedsPoolError(InvalidArgumentError):
    reason = "EXCEEDS_POOL"

    def __init__(self, field: str, needed: int, num_blocks: int) -> None:
        super().__init__(
            field,
            f"needs {needed} blocks and the whole pool has {num_blocks}; no retry can succeed",
            needed=needed,
            num_blocks=num_blocks,
        )


class NotFoundError(PrefixCacheError):
    reason = "NOT_FOUND"


class SequenceNotFoundError(NotFoundError):
    reason = "SEQUENCE_NOT_FOUND"

    def __init__(self, sequence_id: int) -> None:
        super().__init__(
            f"sequence {sequence_id:#018x} is not known to its owner: freed, expired, "
            "never allocated, or from before a restart",
            {"sequence_id": sequence_id},
        )


class SessionNotFoundError(NotFoundError):
    """session: start of the SHA-256 of its id, as ListSessions shows it."""

    reason = "SESSION_NOT_FOUND"

    def __init__(self, session: str) -> None:
        super().__init__(
            f"session {session} is not known: closed, expired, its connection broke, or from "
            "before a restart",
            {"session": session},
        )


class SessionLostError(NotFoundError):
    """Raised by clients: no call on a sequence of that session can succeed any more."""

    reason = "SESSION_LOST"

    def __init__(self, cause: str) -> None:
        super().__init__(f"the session is lost, and its sequences are: {cause}", {"cause": cause})


class AlreadyExistsError(PrefixCacheError):
    reason = "ALREADY_EXISTS"


class RequestIdConflictError(AlreadyExistsError):
    reason = "REQUEST_ID_CONFLICT"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id {request_id!r} already names a sequence with other content or that has "
            "gone on since",
            {"request_id": request_id},
        )


class FailedPreconditionError(PrefixCacheError):
    reason = "FAILED_PRECONDITION"


class WrongPositionError(FailedPreconditionError):
    reason = "WRONG_POSITION"

    def __init__(self, sequence_id: int, given: int, expected: int) -> None:
        super().__init__(
            f"sequence {sequence_id:#018x} stands at position {expected}, the call says {given}",
            {"sequence_id": sequence_id, "given": given, "expected": expected},
        )


class OvertakenError(FailedPreconditionError):
    reason = "OVERTAKEN"

    def __init__(self, number: int, settled: int) -> None:
        super().__init__(
            f"call {number} comes too late: its client waits for none up to {settled} any more",
            {"number": number, "settled": settled},
        )


class BeyondTokensError(FailedPreconditionError):
    reason = "BEYOND_TOKENS"

    def __init__(self, sequence_id: int, given: int, limit: int) -> None:
        super().__init__(
            f"sequence {sequence_id:#018x} has room for {limit} tokens, the call goes up to "
            f"{given}",
            {"sequence_id": sequence_id, "given": given, "limit": limit},
        )


class NotComputedError(FailedPreconditionError):
    reason = "NOT_COMPUTED"

    def __init__(self, sequence_id: int, num_computed: int, num_tokens: int) -> None:
        super().__init__(
            f"sequence {sequence_id:#018x} has {num_computed} of {num_tokens} tokens computed",
            {"sequence_id": sequence_id, "num_computed": num_computed, "num_tokens": num_tokens},
        )


class BlocksInUseError(FailedPreconditionError):
    reason = "BLOCKS_IN_USE"

    def __init__(self, num_referenced: int) -> None:
        super().__init__(
            f"{num_referenced} blocks are referenced; free them or reset with force",
            {"referenced": num_referenced},
        )


class FingerprintMismatchError(FailedPreconditionError):
    reason = "FINGERPRINT_MISMATCH"

    def __init__(self, given: bytes, actual: bytes) -> None:
        super().__init__(
            f"layout fingerprint is {actual.hex()}, the client expects {given.hex()}",
            {"given": given.hex(), "actual": actual.hex()},
        )


class ForkedClientError(FailedPreconditionError):
    """Raised by clients, before anything is sent."""

    reason = "FORKED_CLIENT"

    def __init__(self, pid: int, problem: str) -> None:
        super().__init__(f"this process was forked from process {pid}, {problem}", {"pid": pid})


class ReadOnlyViewError(FailedPreconditionError):
    """Raised by clients, before anything is computed."""

    reason = "READ_ONLY_VIEW"

    def __init__(self, sequence_id: int, position: int) -> None:
        super().__init__(
            f"sequence {sequence_id:#018x} needs its K/V written from position {position} on, and "
            "the view is for reading only",
            {"sequence_id": sequence_id, "position": position},
        )


class NoStorageError(FailedPreconditionError):
    reason = "NO_STORAGE"

    def __init__(self) -> None:
        super().__init__("this daemon holds no K/V memory (--storage none)")


class ArenaLostError(FailedPreconditionError):
    """The Python client sends the tensors in the message then, and makes another arena later."""

    reason = "ARENA_LOST"

    def __init__(self, problem: str) -> None:
        super().__init__(f"the arena cannot be used: {problem}")


class StorageOwnedError(FailedPreconditionError):
    reason = "STORAGE_OWNED"

    def __init__(self) -> None:
        super().__init__(
            "this daemon writes K/V itself, and blocks commit when Prefill or Decode of the last "
            "layer has passed them; only a session that was attached for writing commits"
        )


class EventsOffError(FailedPreconditionError):
    reason = "EVENTS_OFF"

    def __init__(self) -> None:
        super().__init__("the daemon keeps no events: it was started without --event-buffer")


class OutOfRangeError(PrefixCacheError):
    reason = "OUT_OF_RANGE"


class EventsGoneError(OutOfRangeError):
    reason = "EVENTS_GONE"

    def __init__(self, number: int, first_number: int, next_number: int) -> None:
        super().__init__(
            f"event {number} is not there: this start of the daemon has those from {first_number} "
            f"on, and the next one is {next_number}; a snapshot starts anew",
            {"number": number, "first_number": first_number, "next_number": next_number},
        )


class ResourceExhaustedError(PrefixCacheError):
    reason = "RESOURCE_EXHAUSTED"


class NoRoomError(ResourceExhaustedError):
    """referenced: where there are tenants, blocks that the caller's holds; the rest are others'.

    quarantined: blocks that a stalled process may still write to; no field if there are none, nor
    where there are tenants.

    holders: who holds most, in the fields `holder_1_name`, `holder_1_digest`, `holder_1_blocks`.

    A name is empty without a session. A digest is the `owner_digest` of the lists of sequences and
    sessions. Blocks are those in the tables of the owner's sequences; what they share counts once
    for each. Absent are those that there are not, or that the caller may not know of.
    """

    reason = "NO_ROOM"

    def __init__(
        self,
        needed: int,
        free: int,
        referenced: int,
        holders: Iterable[BlockHolder] = (),
        *,
        quarantined: int = 0,
    ) -> None:
        message = f"needs {needed} blocks, {free} free, {referenced} referenced"
        fields: dict[str, str | int] = {"needed": needed, "free": free, "referenced": referenced}
        if quarantined:
            message += f", {quarantined} quarantined"
            fields["quarantined"] = quarantined
        most = []
        for place, (name, digest, num_blocks) in enumerate(holders, 1):
            fields[f"holder_{place}_name"] = name
            fields[f"holder_{place}_digest"] = digest
            fields[f"holder_{place}_blocks"] = num_blocks
            most.append(f"{num_blocks} by {repr(name) + ' ' if name else ''}{digest}")
        super().__init__(message + (f"; most held: {', '.join(most)}" if most else ""), fields)

    def naming(self, holders: Iterable[BlockHolder]) -> NoRoomError:
        """The same with the names of those who hold most."""
        needed, free, referenced, quarantined = (
            int(self.fields.get(name, 0))
            for name in ("needed", "free", "referenced", "quarantined")
        )
        return NoRoomError(needed, free, referenced, holders, quarantined=quarantined)


class QuotaExceededError(ResourceExhaustedError):
    """needed: blocks more than the tenant holds, or, if that is above `max`, of one sequence."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, needed: int, held: int, allowed: int) -> None:
        super().__init__(
            f"needs {needed} blocks, the tenant holds {held} and may hold {allowed}"
            + ("; no retry can succeed" if needed > allowed else ""),
            {"needed": needed, "held": held, "max": allowed},
        )

    @property
    def is_permanent(self) -> bool:
        """True if the sequence alone is too much, whatever the tenant frees."""
        return int(self.fields["needed"]) > int(self.fields["max"])


class TooManyStreamsError(ResourceExhaustedError):
    reason = "TOO_MANY_STREAMS"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} streams are open, or kept for other tenants, and no more are served",
            {"limit": limit},
        )


class TooManySessionsError(ResourceExhaustedError):
    reason = "TOO_MANY_SESSIONS"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} sessions are open, or kept for other tenants, and no more are taken",
            {"limit": limit},
        )


class TooManySequencesError(ResourceExhaustedError):
    reason = "TOO_MANY_SEQUENCES"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"an owner has at most {limit} sequences; free some of them", {"limit": limit}
        )


class TooManyOwnersError(ResourceExhaustedError):
    reason = "TOO_MANY_OWNERS"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} owners without a session have sequences, or are kept for other tenants, and "
            "no more are taken",
            {"limit": limit},
        )


class TooManyCallsError(ResourceExhaustedError):
    reason = "TOO_MANY_CALLS"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} calls wait for a thread, or their places are kept for other tenants, and no "
            "more are taken",
            {"limit": limit},
        )


class WaitedTooLongError(ResourceExhaustedError):
    reason = "WAITED_TOO_LONG"

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the call has waited {limit_s:g} s for a thread, and nothing was done",
            {"limit_s": f"{limit_s:g}"},
        )


class AbortedError(PrefixCacheError):
    reason = "ABORTED"


class SequenceBusyError(AbortedError):
    reason = "SEQUENCE_BUSY"

    def __init__(self, sequence_id: int) -> None:
        super().__init__(
            f"a call is running on sequence {sequence_id:#018x}", {"sequence_id": sequence_id}
        )


class UnauthenticatedError(PrefixCacheError):
    reason = "UNAUTHENTICATED"

    def __init__(self, problem: str) -> None:
        super().__init__(f"the daemon asks for credentials: {problem}")


class PermissionDeniedError(PrefixCacheError):
    reason = "PERMISSION_DENIED"

    def __init__(self, needed_role: str) -> None:
        super().__init__(
            f"the call needs the role {needed_role}, which the caller has not",
            {"needed_role": needed_role},
        )


class AttachDeniedError(PermissionDeniedError):
    """access: "read" or "write"."""

    reason = "ATTACH_DENIED"

    def __init__(self, access: str) -> None:
        PrefixCacheError.__init__(
            self,
            f"the caller may not attach to the pool's memory to {access} it: see --attach, and "
            "'attach' in the auth file",
            {"access": access},
        )


class UnavailableError(PrefixCacheError):
    reason = "UNAVAILABLE"


class DrainingError(UnavailableError):
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the daemon is stopping and takes no new sequences")


class DeadlineExceededError(PrefixCacheError):
    reason = "DEADLINE_EXCEEDED"


class CancelledCallError(PrefixCacheError):
    reason = "CANCELLED"


class InternalError(PrefixCacheError):
    reason = "INTERNAL"
