"""Calls on tokens and blocks: build the request from where a sequence stands, advance it by the
reply. No I/O; attention is in `attention_calls`.

A call that fails or a row that is refused leaves the state as it was, so the same call may come
again: the daemon answers a repeat of what it has already done. Not thread-safe, as `SequenceState`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.client.columns import uint32, uint32_column, uint32_rows
from prefixcache.client.messages import Call, extra_keys_message, new_request_id
from prefixcache.client.prompt_request import PromptRequest
from prefixcache.client.results import ServerInfo
from prefixcache.client.row_errors import result_codes, row_error
from prefixcache.client.sequence_state import SequenceState
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc.wire import column32, column64, read_column32, read_column64, twin
from prefixcache.types import (
    AppendResult,
    BlockCopy,
    CacheUse,
    CommitResult,
    ExtraKeys,
    FullHit,
    ResultCode,
    SequenceId,
)

States = Sequence[SequenceState]

_WITHOUT_BLOCKS = {code: AppendResult(code) for code in ResultCode}


def allocate(
    owner: bytes,
    info: ServerInfo,
    tokens: npt.ArrayLike,
    *,
    extra_keys: ExtraKeys | None,
    num_lookahead_tokens: int,
    cache_use: CacheUse,
    full_hit: FullHit,
    resumed: bool,
    request_id: str | None,
    wait_pending_s: float = 0.0,
    timeout_s: float = math.inf,
) -> Call[SequenceState]:
    """request_id: None for a random one, without which no repeat would be safe.

    timeout_s: of the call, which must leave the wait time to end.
    """
    column = uint32_column(tokens, "token_ids")
    num_lookahead_tokens = uint32(num_lookahead_tokens, "num_lookahead_tokens")
    own_id = "" if request_id else new_request_id()
    request = PromptRequest(
        "AllocateRequest",
        column,
        owner=owner,
        request_id=request_id or own_id,
        extra_keys=extra_keys_message(extra_keys),
        num_lookahead_tokens=num_lookahead_tokens,
        cache_use=cache_use,
        full_hit=full_hit,
        layout_fingerprint=info.fingerprint,
        resumed=resumed,
        wait_pending_ms=_wait_ms(wait_pending_s, timeout_s),
    )

    def read(reply: Any) -> SequenceState:
        return SequenceState(
            SequenceId(reply.sequence_id),
            num_tokens=len(column),
            num_cached_tokens=reply.num_cached_tokens,
            num_cached_blocks=reply.num_cached_blocks,
            num_pending_tokens=reply.num_pending_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            block_table=array("i", read_column32(reply.block_ids).astype(np.int32).tobytes()),
            block_size=info.block_size,
            num_layers=info.layout.num_layers if info.layout else 1,
        )

    # With a request id of the caller's, a repeat may be on its way, and would be given the same
    # sequence.
    return Call("Allocate", request, read, (own_id,) if own_id else ())


def _wait_ms(wait_s: float, timeout_s: float) -> int:
    if not 0 <= wait_s < timeout_s:
        raise InvalidArgumentError(
            "wait_pending_s",
            f"is {wait_s:g}, must be 0 or more and below the timeout, {timeout_s:g}",
        )
    return uint32(math.ceil(wait_s * 1000), "wait_pending_s")


def append(
    owner: bytes,
    states: States,
    tokens: Sequence[npt.ArrayLike],
    num_kv_valid: npt.ArrayLike | None,
    num_lookahead_tokens: npt.ArrayLike | None,
    extra_keys: Sequence[ExtraKeys | None] | None,
) -> Call[list[AppendResult]]:
    """One row a sequence; a row may be refused, which its result says."""
    check_distinct(states)
    check_length(tokens, "token_ids", states)
    token_ids, lengths = uint32_rows(tokens, "token_ids")
    valid = _optional_column(num_kv_valid, "num_kv_valid", states)
    lookahead = _optional_column(num_lookahead_tokens, "num_lookahead_tokens", states)
    request = twin("AppendRequest")(
        owner=owner,
        sequence_ids=sequence_ids(states),
        start_positions=column32([state.num_tokens for state in states]),
        num_tokens=column32(lengths),
        token_ids=column32(token_ids),
        num_kv_valid=column32(valid),
        num_lookahead_tokens=column32(lookahead),
    )
    if extra_keys is not None:
        check_length(extra_keys, "extra_keys", states)
        for index, keys in enumerate(extra_keys):
            if keys:
                request.extra_keys.add(row=index, extra_keys=extra_keys_message(keys))

    def read(reply: Any) -> list[AppendResult]:
        results = _append_results(reply)
        for state, result, length, num_valid, num_ahead in zip(
            states,
            results,
            lengths,
            valid or repeat(0, len(states)),
            lookahead or repeat(0, len(states)),
            strict=True,
        ):
            if result.code is ResultCode.OK:
                state.appended(length, num_valid, num_ahead, result)
        return results

    return Call("Append", request, read, states=states)


def append_one(
    owner: bytes,
    state: SequenceState,
    tokens: npt.ArrayLike,
    num_kv_valid: int,
    num_lookahead_tokens: int,
    extra_keys: ExtraKeys | None,
) -> Call[AppendResult]:
    """A refusal is raised."""
    position = state.num_tokens
    batch = append(owner, [state], [tokens], [num_kv_valid], [num_lookahead_tokens], [extra_keys])

    def read(reply: Any) -> AppendResult:
        (result,) = batch.read(reply)
        if result.code is not ResultCode.OK:
            raise row_error(result.code, state.sequence_id, position, free=reply.num_blocks_free)
        return result

    return Call(batch.method, batch.request, read, states=[state])


def commit(
    owner: bytes, states: States, num_computed_tokens: npt.ArrayLike
) -> Call[list[CommitResult]]:
    """One row a sequence; a row may be refused, which its result says."""
    check_distinct(states)
    counts = uint32_column(num_computed_tokens, "num_computed_tokens").tolist()
    check_length(counts, "num_computed_tokens", states)
    starts = [state.num_committed for state in states]
    request = twin("CommitRequest")(
        owner=owner,
        sequence_ids=sequence_ids(states),
        start_positions=column32(starts),
        num_computed_tokens=column32(counts),
    )

    def read(reply: Any) -> list[CommitResult]:
        num_cached = read_column32(reply.num_cached_blocks).tolist()
        codes = result_codes(reply.result_codes)
        results = list(map(CommitResult, codes, num_cached))
        for state, result, start, count in zip(states, results, starts, counts, strict=True):
            if result.code is ResultCode.OK:
                state.committed(start + count)
        return results

    return Call("Commit", request, read)


def commit_one(owner: bytes, state: SequenceState, num_computed_tokens: int) -> Call[CommitResult]:
    """A refusal is raised."""
    position = state.num_committed
    batch = commit(owner, [state], [num_computed_tokens])

    def read(reply: Any) -> CommitResult:
        (result,) = batch.read(reply)
        if result.code is not ResultCode.OK:
            raise row_error(
                result.code,
                state.sequence_id,
                position,
                given=position + num_computed_tokens,
                limit=state.num_tokens,
            )
        return result

    return Call(batch.method, batch.request, read)


def fork(
    owner: bytes, state: SequenceState, num_children: int, request_ids: Sequence[str] | None
) -> Call[list[SequenceState]]:
    """request_ids: one a child; None for random ones, without which no repeat would be safe."""
    own_ids: tuple[str, ...] = ()
    if request_ids is None:
        request_ids = own_ids = tuple(new_request_id() for _ in range(num_children))
    elif len(request_ids) != num_children or not all(request_ids):
        raise InvalidArgumentError(
            "request_ids", f"must be {num_children}, one a child, and not empty"
        )
    request = twin("ForkRequest")(
        owner=owner,
        sequence_id=state.sequence_id,
        num_tokens=state.num_tokens,
        request_ids=request_ids,
    )

    def read(reply: Any) -> list[SequenceState]:
        child_ids = read_column64(reply.sequence_ids).tolist()
        return state.forked([SequenceId(child_id) for child_id in child_ids])

    return Call("Fork", request, read, own_ids, states=[state])


def truncate(owner: bytes, state: SequenceState, num_tokens: int) -> Call[tuple[int, ...]]:
    """The length after the call; the reply names the block ids dropped."""
    request = twin("TruncateRequest")(
        owner=owner,
        sequence_id=state.sequence_id,
        num_tokens_before=state.num_tokens,
        num_tokens_after=uint32(num_tokens, "num_tokens_after"),
    )

    def read(reply: Any) -> tuple[int, ...]:
        state.truncated(num_tokens)
        return tuple(read_column32(reply.dropped_block_ids).tolist())

    return Call("Truncate", request, read, states=[state])


def free(owner: bytes, states: States) -> Call[list[ResultCode]]:
    """A sequence that the daemon does not know any more is as free as one that it frees now."""

    def read(reply: Any) -> list[ResultCode]:
        for state in states:
            state.is_freed = True
        return result_codes(reply.result_codes)

    request = twin("FreeRequest")(owner=owner, sequence_ids=sequence_ids(states))
    return Call("Free", request, read, goes_on=True, states=states)


def gone(states: States) -> list[ResultCode]:
    """What `free` finds of sequences whose session is lost."""
    for state in states:
        state.is_freed = True
    return [ResultCode.NOT_FOUND] * len(states)


def _append_results(reply: Any) -> list[AppendResult]:
    # Most rows bring neither blocks nor copies; those of a code are one and the same result.
    results = [_WITHOUT_BLOCKS[code] for code in result_codes(reply.result_codes)]
    if not reply.new_block_ids and not reply.copy_sources:
        return results
    num_new, num_copies = (
        read_column32(column).tolist() for column in (reply.num_new_blocks, reply.num_copies)
    )
    new_ids = _take_from(read_column32(reply.new_block_ids).tolist())
    sources = read_column32(reply.copy_sources).tolist()
    copies = _take_from(
        list(map(BlockCopy, sources, read_column32(reply.copy_destinations).tolist()))
    )
    for row, (result, new, copied) in enumerate(zip(results, num_new, num_copies, strict=True)):
        if new or copied:
            results[row] = AppendResult(result.code, new_ids(new), copies(copied))
    return results


def _take_from(values: list[Any]) -> Callable[[int], tuple[Any, ...]]:
    """A function that takes the next so many values of a column."""
    remaining = iter(values)
    return lambda count: tuple(islice(remaining, count))


def sequence_ids(states: States) -> bytes:
    return column64([state.sequence_id for state in states])


def _optional_column(values: npt.ArrayLike | None, field: str, states: States) -> list[int]:
    """Empty for all zeros, which is how the wire says it."""
    if values is None:
        return []
    column = uint32_column(values, field)
    counts: list[int] = column.tolist()
    check_length(counts, field, states)
    return counts if column.any() else []


def check_length(values: Sequence[Any], field: str, states: States) -> None:
    if len(values) != len(states):
        raise InvalidArgumentError(
            field, f"has {len(values)} rows, there are {len(states)} sequences"
        )


def check_distinct(states: States) -> None:
    """Both rows would start at the same position, and the second count as a repeat."""
    if len({state.sequence_id for state in states}) < len(states):
        raise InvalidArgumentError("sequence_ids", "holds one sequence twice")
