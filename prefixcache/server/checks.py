"""What every request must satisfy before it reaches the core.

Each check raises InvalidArgumentError with the field's name and the limit. Requests are twins (see
`prefixcache.rpc.wire`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.extra_keys import check_extra_keys
from prefixcache.core.form import FORM
from prefixcache.core.sessions import SESSION_ID_BYTES, CallOrder
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc import codec
from prefixcache.rpc.wire import read_column32, read_column64
from prefixcache.server.callers import Caller
from prefixcache.types import NO_EXTRA_KEYS, CacheUse, ExtraKeys, FullHit, TokenIds

_columns_agree: Callable[..., bool] | None = None
if FORM == "native":
    from prefixcache.core.native.append import columns_agree

    _columns_agree = columns_agree

OWNER_BYTES = 16
MAX_REQUEST_ID_BYTES = 256
_CACHE_USES: dict[int, CacheUse] = {0: CacheUse.READ_WRITE, **{int(use): use for use in CacheUse}}
_FULL_HITS: dict[int, FullHit] = {0: FullHit.LAST_TOKEN, **{int(hit): hit for hit in FullHit}}
"""By their values on the wire, of which 0 is the default."""


def owner(value: bytes, caller: Caller) -> bytes:
    """The owner key of bytes that a client made up, or of the id of a session."""
    if len(value) not in (OWNER_BYTES, SESSION_ID_BYTES):
        raise InvalidArgumentError(
            "owner",
            f"has {len(value)} bytes, must have {OWNER_BYTES}, or {SESSION_ID_BYTES} for a session",
        )
    return caller.owner_key(value)


def session_id(value: bytes, caller: Caller) -> bytes:
    """The owner key of a session."""
    if len(value) != SESSION_ID_BYTES:
        raise InvalidArgumentError(
            "session_id", f"has {len(value)} bytes, must have {SESSION_ID_BYTES}"
        )
    return caller.owner_key(value)


def order(request: Any) -> CallOrder | None:
    """Of a request, or of an attention batch, that has one."""
    if not request.HasField("order"):
        return None
    number, settled = request.order.number, request.order.settled
    if settled >= number:
        raise InvalidArgumentError(
            "order.settled", f"is {settled}, must be below number ({number})"
        )
    return CallOrder(number, settled)


def request_id(value: str, field: str = "request_id") -> str:
    if len(value.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(field, f"is longer than {MAX_REQUEST_ID_BYTES} bytes")
    return value


def request_names(values: Iterable[str]) -> list[str]:
    """Request ids that name sequences. An empty one is no name."""
    names = [request_id(value, "request_ids") for value in values]
    if not all(names):
        raise InvalidArgumentError("request_ids", "holds an empty one, which names no sequence")
    return names


def num_tokens(num: int, field: str, limit: int) -> int:
    """Tokens that a call brings or asks for: at most `limit`."""
    if num > limit:
        raise InvalidArgumentError(
            field, f"a call has at most {limit} tokens, this one has {num}", limit=limit
        )
    return num


def prompt_with_lookahead(
    request: Any, caller: Caller, block_size: int, max_tokens: int
) -> tuple[TokenIds, ExtraKeys]:
    """`prompt` of a Lookup or an Allocate. max_tokens: with the lookahead."""
    token_ids, extra_keys = prompt(request, caller, block_size, max_tokens)
    num_lookahead_tokens = request.num_lookahead_tokens
    if num_lookahead_tokens:
        num_tokens(len(token_ids) + num_lookahead_tokens, "num_lookahead_tokens", max_tokens)
    return token_ids, extra_keys


def prompt(
    request: Any, caller: Caller, block_size: int, max_tokens: int
) -> tuple[TokenIds, ExtraKeys]:
    """Token ids and extra keys, in the caller's namespace, of a request that has a prompt."""
    token_ids = read_column32(request.token_ids)
    if not 1 <= len(token_ids) <= max_tokens:
        num_tokens(len(token_ids), "token_ids", max_tokens)
        raise InvalidArgumentError("token_ids", "is empty, a prompt has at least one token")
    if not request.HasField("extra_keys"):
        return token_ids, caller.own_keys(NO_EXTRA_KEYS)
    extra_keys = codec.extra_keys_from_wire(request.extra_keys)
    if extra_keys:
        check_extra_keys(extra_keys, 0, len(token_ids), block_size)
    return token_ids, caller.own_keys(extra_keys)


class Rows(NamedTuple):
    """Columns of a request about distinct sequences, `[R]` each; two of 4 bytes follow the ids."""

    sequence_ids: npt.NDArray[np.uint64]
    first: npt.NDArray[np.uint32]
    second: npt.NDArray[np.uint32]

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        return self.sequence_ids.tolist(), self.first.tolist(), self.second.tolist()


def row_count(num: int, field: str, limit: int) -> int:
    """Rows of a batch: at most `limit`."""
    if num > limit:
        raise InvalidArgumentError(
            field, f"a call has at most {limit} rows, this one has {num}", limit=limit
        )
    return num


def rows(request: Any, first: str, second: str, max_rows: int) -> Rows:
    """first, second: names of the columns beside `sequence_ids`."""
    sequence_ids = read_column64(request.sequence_ids)
    num = row_count(len(sequence_ids), "sequence_ids", max_rows)
    if not num:
        raise InvalidArgumentError("sequence_ids", "is empty")
    found = Rows(
        sequence_ids,
        read_column32(getattr(request, first)),
        read_column32(getattr(request, second)),
    )
    for field, column in ((first, found.first), (second, found.second)):
        if len(column) != num:
            raise InvalidArgumentError(field, f"has {len(column)} rows, sequence_ids has {num}")
    if len(set(sequence_ids.tolist())) < num:
        raise InvalidArgumentError("sequence_ids", "holds one sequence twice")
    return found


def wait_pending_s(value_ms: int, longest_s: float) -> float:
    if value_ms > longest_s * 1000:
        raise InvalidArgumentError(
            "wait_pending_ms", f"is {value_ms}, must be at most {longest_s * 1000:.0f}"
        )
    return value_ms / 1000


def cache_use(value: int) -> CacheUse:
    found = _CACHE_USES.get(value)
    if found is None:
        raise InvalidArgumentError("cache_use", f"{value} is not a value")
    return found


def full_hit(value: int) -> FullHit:
    found = _FULL_HITS.get(value)
    if found is None:
        raise InvalidArgumentError("full_hit", f"{value} is not a value")
    return found


def append_batch(request: Any, block_size: int, max_tokens: int, max_rows: int) -> AppendBatch:
    """The rows of an Append. max_tokens: of all of them, with the lookahead."""
    columns = (
        request.sequence_ids,
        request.start_positions,
        request.num_tokens,
        request.token_ids,
        request.num_kv_valid,
        request.num_lookahead_tokens,
    )
    if _columns_agree is None or not _columns_agree(*columns, max_tokens, max_rows):
        _check_append_columns(request, max_tokens, max_rows)
    extra_keys = request.extra_keys
    return AppendBatch(*columns, _append_extra_keys(request, block_size) if extra_keys else {})


def _check_append_columns(request: Any, max_tokens: int, max_rows: int) -> None:
    token_ids = read_column32(request.token_ids)
    num = num_tokens(len(token_ids), "token_ids", max_tokens)
    columns = rows(request, "start_positions", "num_tokens", max_rows)
    num_rows, row_tokens = len(columns.sequence_ids), columns.second
    num_kv_valid = _optional_column(request, "num_kv_valid", num_rows)
    num_lookahead_tokens = _optional_column(request, "num_lookahead_tokens", num_rows)
    num_tokens(num + sum(num_lookahead_tokens.tolist()), "num_lookahead_tokens", max_tokens)
    total = sum(row_tokens.tolist())
    if total != len(token_ids):
        raise InvalidArgumentError(
            "token_ids", f"has {len(token_ids)} tokens, num_tokens sums to {total}"
        )
    if (num_kv_valid > row_tokens).any():
        raise InvalidArgumentError("num_kv_valid", "is larger than num_tokens in some row")


def _optional_column(request: Any, field: str, num_rows: int) -> npt.NDArray[np.uint32]:
    """Zeros if it is left out."""
    values = read_column32(getattr(request, field))
    if not len(values):
        return np.zeros(num_rows, dtype=np.uint32)
    if len(values) != num_rows:
        raise InvalidArgumentError(field, f"has {len(values)} rows, must have {num_rows}")
    return values


def _append_extra_keys(request: Any, block_size: int) -> dict[int, ExtraKeys]:
    """The extra keys of an Append's rows, by row."""
    start_positions = read_column32(request.start_positions)
    row_tokens = read_column32(request.num_tokens)
    by_row: dict[int, ExtraKeys] = {}
    for entry in request.extra_keys:
        if entry.row >= len(row_tokens) or by_row.get(entry.row):
            raise InvalidArgumentError("extra_keys.row", f"{entry.row} is no row, or stands twice")
        keys = codec.extra_keys_from_wire(entry.extra_keys)
        if keys.lora or keys.cache_salt:
            raise InvalidArgumentError(
                "extra_keys.extra_keys", "lora and cache_salt belong to Allocate"
            )
        start = int(start_positions[entry.row])
        check_extra_keys(keys, start, start + int(row_tokens[entry.row]), block_size)
        by_row[entry.row] = keys
    return by_row
