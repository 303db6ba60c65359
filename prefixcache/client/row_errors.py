"""The codes of a batch reply's rows, and the error that each stands for in a call on one sequence.

One table; a row carries no message and fewer numbers than a status does. Pure functions.
"""

from __future__ import annotations

from prefixcache.errors import (
    BeyondTokensError,
    ExceedsPoolError,
    InternalError,
    InvalidArgumentError,
    NoRoomError,
    PrefixCacheError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceNotFoundError,
    WrongPositionError,
)
from prefixcache.rpc.wire import column32, read_column32
from prefixcache.types import ResultCode

ROW_ERRORS: dict[ResultCode, tuple[type[PrefixCacheError], str]] = {
    ResultCode.NOT_FOUND: (
        SequenceNotFoundError,
        "is not known to its owner: freed, expired, never allocated, or from before a restart",
    ),
    ResultCode.WRONG_POSITION: (WrongPositionError, "does not stand at that position"),
    ResultCode.BUSY: (SequenceBusyError, "has a call running on it"),
    ResultCode.NO_ROOM: (NoRoomError, "needs more blocks than are free now"),
    ResultCode.EXCEEDS_POOL: (
        ExceedsPoolError,
        "needs more blocks than the whole pool has; no retry can succeed",
    ),
    ResultCode.QUOTA_EXCEEDED: (
        QuotaExceededError,
        "needs more blocks than its tenant may hold besides what it holds",
    ),
    ResultCode.BEYOND_TOKENS: (BeyondTokensError, "has fewer tokens than that"),
}


_CODES = {code.value: code for code in ResultCode}
_OK = column32([ResultCode.OK])


def result_codes(column: bytes) -> list[ResultCode]:
    """The codes of a reply. Raises InternalError for one that this version does not know."""
    num_rows = len(column) // len(_OK)
    if column == _OK * num_rows:
        return [ResultCode.OK] * num_rows
    try:
        return [_CODES[code] for code in read_column32(column).tolist()]
    except KeyError as error:
        raise InternalError(
            f"the daemon answered with a result code of a newer API: {error}"
        ) from None


def row_error(
    code: ResultCode, sequence_id: int, position: int, **numbers: int
) -> PrefixCacheError:
    """The error of a refused row. position: where the call said that the sequence stands."""
    error, problem = ROW_ERRORS[code]
    numbers = {"position": position, **numbers}
    fields: dict[str, str | int] = {"sequence_id": sequence_id, **numbers}
    if issubclass(error, InvalidArgumentError):
        fields["field"] = "token_ids"
    details = ", ".join(f"{name} {value}" for name, value in numbers.items())
    return error.from_wire(f"sequence {sequence_id:#018x} {problem} ({details})", fields)
