"""Reading a request trace, and token ids that share prefixes as the trace says.

Owns the meaning of a record and of its ids; knows no cache. Immutable once read.

One record a request, in replay order (`trace_file` makes them of files in other formats):

    input_length   prompt length in tokens, n
    hash_ids       one id for each trace block of the prompt, in order
    hash_runs      instead of hash_ids: [[first, count], ...], for first, first + 1, ... each
    timestamp      milliseconds since any start; may be absent, and a replay does not need it
    trace_block    tokens of a trace block; may be absent

A prompt has ceil(n / trace_block) ids, or floor(n / trace_block) without one for the partly filled
last trace block, whose content is then unlike any other request's. Source of the format: the
Mooncake traces (FAST'25), whose trace block is 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay.trace_file import DEFAULT_TRACE_BLOCK, bad_line, read_records
from prefixcache.types import TokenIds

_MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt. `keys`: `[ceil(num_tokens / trace_block)] uint32`, one a trace block.

    A key stands for the content of its trace block and of everything before it, so two prompts
    share their first k trace blocks exactly if their first k keys are equal. timestamp_ms: since
    any start, None if the trace does not say.
    """

    num_tokens: int
    keys: npt.NDArray[np.uint32]
    timestamp_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """All requests in replay order. `num_keys`: distinct keys, which are 1 to `num_keys`."""

    trace_block: int
    requests: tuple[TraceRequest, ...]
    num_keys: int

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_tokens for request in self.requests)

    def token_ids(self, request: TraceRequest) -> TokenIds:
        """The prompt, `[num_tokens] uint32`: position p of the trace block with key k holds
        `k * trace_block + p`. A new array at each call.
        """
        firsts = request.keys * np.uint32(self.trace_block)
        offsets = np.arange(self.trace_block, dtype=np.uint32)
        token_ids: TokenIds = np.add.outer(firsts, offsets).reshape(-1)[: request.num_tokens]
        return token_ids

    def num_blocks_without_eviction(self, block_size: int) -> int:
        """Blocks of a pool that never evicts: all distinct content, and one partly filled block.

        One is enough, since requests run one at a time and a block without a hash is reused first.
        """
        return self.num_keys * (self.trace_block // block_size) + 1


def read_trace(
    path: Path,
    trace_block: int | None = None,
    first: int | None = None,
    on_read: Callable[[int], object] | None = None,
) -> Trace:
    """Read the first `first` requests of a trace, all by default.

    trace_block: tokens that one id of the file stands for; by default what the first line says,
    else 512. on_read: told of bytes as they are read. Raises OSError, or InvalidArgumentError that
    names the line, also for more distinct blocks than uint32 token ids can tell apart.
    """
    keys_of: dict[tuple[int, int | str], int] = {}
    requests: list[TraceRequest] = []
    for line_number, record in islice(read_records(path, trace_block, on_read), first):
        try:
            trace_block = _trace_block(record, trace_block)
            num_tokens = _num_tokens(record)
            ids = _block_ids(record, num_tokens, trace_block)
            timestamp_ms = _timestamp_ms(record)
        except ValueError as error:
            raise bad_line(line_number, str(error)) from error
        if len(ids) * trace_block < num_tokens:
            ids.append(f"tail of {len(requests)}")
        requests.append(TraceRequest(num_tokens, _chain(keys_of, ids), timestamp_ms))
    trace_block = trace_block or DEFAULT_TRACE_BLOCK
    num_keys = len(keys_of)
    if (num_keys + 1) * trace_block - 1 > _MAX_TOKEN_ID:
        raise InvalidArgumentError(
            "trace",
            f"{num_keys} distinct blocks of {trace_block} tokens need more than 2**32 token ids; "
            "read fewer requests",
            num_keys=num_keys,
        )
    return Trace(trace_block, tuple(requests), num_keys)


def _trace_block(record: dict[str, Any], wanted: int | None) -> int:
    """wanted: what was asked for, or what earlier lines said."""
    said = record.get("trace_block")
    if said is None:
        return wanted or DEFAULT_TRACE_BLOCK
    if type(said) is not int or said < 1:
        raise ValueError(f"trace_block is {said!r}, must be an integer of at least 1")
    if wanted not in (None, said):
        raise ValueError(f"its ids stand for {said} tokens each, not {wanted}")
    return said


def _timestamp_ms(record: dict[str, Any]) -> float | None:
    timestamp = record.get("timestamp")
    if timestamp is None:
        return None
    if type(timestamp) not in (int, float) or not isfinite(timestamp):
        raise ValueError(f"timestamp is {timestamp!r}, must be a number of milliseconds")
    return float(timestamp)


def _num_tokens(record: dict[str, Any]) -> int:
    num_tokens = record.get("input_length")
    if type(num_tokens) is not int or num_tokens < 1:
        raise ValueError(f"input_length is {num_tokens!r}, must be an integer of at least 1")
    return num_tokens


def _block_ids(record: dict[str, Any], num_tokens: int, trace_block: int) -> list[int | str]:
    # A wrong trace_block shows here; cutting surplus ids would give wrong counts in silence.
    fewest, most = num_tokens // trace_block, -(-num_tokens // trace_block)
    runs = _runs(record)
    num_ids = sum(count for _, count in runs)
    if not fewest <= num_ids <= most:
        raise ValueError(
            f"has {num_ids} ids for {num_tokens} tokens; trace blocks of {trace_block} tokens "
            f"make {fewest} or {most}; --trace-block says how many"
        )
    return [block_id for first, count in runs for block_id in range(first, first + count)]


def _runs(record: dict[str, Any]) -> list[tuple[int, int]]:
    """The ids of either spelling as runs of (first, count)."""
    if "hash_ids" in record:
        ids = record["hash_ids"]
        if not isinstance(ids, list) or not all(type(block_id) is int for block_id in ids):
            raise ValueError("hash_ids is not a list of integers")
        return [(block_id, 1) for block_id in ids]
    runs = record.get("hash_runs")
    if runs is None:
        raise ValueError("has neither hash_ids nor hash_runs")
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        raise ValueError("hash_runs is not a list of [first, count] with counts of at least 1")
    return [(first, count) for first, count in runs]


def _is_run(run: object) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 2
        and all(type(number) is int for number in run)
        and run[1] >= 1
    )


def _chain(
    keys_of: dict[tuple[int, int | str], int], ids: list[int | str]
) -> npt.NDArray[np.uint32]:
    """Keys of a chain of ids. A key is interned from (key of the block before, id), 0 before all,
    so equal ids at other places or after other prefixes are other content.
    """
    key = 0
    keys = []
    for block_id in ids:
        link = (key, block_id)
        found = keys_of.get(link)
        if found is None:
            found = keys_of[link] = len(keys_of) + 1
        key = found
        keys.append(key)
    return np.array(keys, dtype=np.uint32)
