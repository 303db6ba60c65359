"""Stack distances: for each block that a trace asks for, the smallest pool that still has it.

One walk over the requests gives the hits of every pool size, since a larger pool always holds what
a smaller one does. Owns that walk; what is made of it is `curve`'s and `working_set`'s business.

The pool's own policy is followed exactly, for one request at a time and prompts only. A request
moves all its full blocks to the recent end, the first of the prompt last. So

* of what an earlier request asked for, those blocks that nobody asked for since are consecutive,
  from the deepest up. The stack is a list of requests with a number of blocks each, and a prompt
  meets few of them: its blocks come in runs, whose distances are consecutive. The work is
  O(requests log requests), beside one look at each block.
* a partly filled block takes one of the pool's blocks while its request runs, and leaves it blank.
  Until a prompt without one misses, a pool of N blocks has N - 1 cached. That decides the hits at
  distance N, and only those.
* a request that needs more blocks than the pool has changes nothing. Pools that admit the same
  requests share a walk, so one is enough for all sizes from the largest request on.

Source: Mattson, Gecsei, Slutz, Traiger, "Evaluation techniques for storage hierarchies" (1970).
Kept out: a tree over all blocks, which costs a logarithm for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay.trace import Trace, TraceRequest

Column = npt.NDArray[np.int64]
Track = Callable[[Sequence[TraceRequest], str], Iterable[TraceRequest]]
"""Wraps the requests of a walk of that name, to show how far it has come."""

_NEVER = -1


@dataclass(frozen=True, slots=True)
class Reuse:
    """Blocks that were asked for before, as runs of consecutive blocks of one request.

    All blocks of a run were last asked for by the same request. Columns, one row a run: `request`
    and `previous`, indices of requests; `smallest_pool`, the blocks of the smallest pool that hits
    the run's first block, where the next block needs one more, and so on; `num_blocks` of the run.

    By request, `[n]`, 0 for those that are not admitted: `num_queried` full blocks and
    `num_new`, those that nobody asked for before. is_admitted: `[n] bool`.
    fills_up_to: pools of at most so many blocks have no blank block at the end.
    """

    block_size: int
    is_admitted: npt.NDArray[np.bool_]
    num_queried: Column
    num_new: Column
    request: Column
    previous: Column
    smallest_pool: Column
    num_blocks: Column
    fills_up_to: float


def blocks_needed(trace: Trace, block_size: int) -> Column:
    """Blocks of each request, the partly filled one included: `[n]`."""
    num_tokens = np.array([request.num_tokens for request in trace.requests], dtype=np.int64)
    return -(-num_tokens // block_size)


def check_block_size(block_size: int, trace_block: int) -> None:
    """Raises InvalidArgumentError unless blocks of the trace and of the pool end together."""
    if trace_block % block_size and block_size % trace_block:
        raise InvalidArgumentError(
            "block_size",
            f"{block_size} neither divides the trace block of {trace_block} tokens nor is a "
            "multiple of it",
        )


def find_reuse(
    trace: Trace,
    block_size: int,
    max_blocks: int | None = None,
    track: Track | None = None,
) -> Reuse:
    """Walk a trace once. max_blocks: leave out requests that need more blocks, as a pool of so
    many would.

    block_size: divides the trace block, or is a multiple of it. Raises InvalidArgumentError for
    another one.
    """
    check_block_size(block_size, trace.trace_block)
    needed = blocks_needed(trace, block_size)
    is_admitted = needed <= (needed.max(initial=0) if max_blocks is None else max_blocks)
    stack = _Stack(len(trace.requests), _num_block_names(trace, block_size))
    num_new = np.zeros(len(trace.requests), dtype=np.int64)
    num_queried = np.zeros(len(trace.requests), dtype=np.int64)
    name = f"blocks of {block_size}" + ("" if max_blocks is None else f", pool of {max_blocks}")
    for index, request in enumerate(track(trace.requests, name) if track else trace.requests):
        if is_admitted[index]:
            blocks = _block_names(trace, request, block_size)
            has_tail = request.num_tokens % block_size > 0
            num_queried[index] = len(blocks)
            num_new[index] = stack.push(index, blocks, has_tail)
    requests, previous, smallest, lengths = np.array(stack.runs, np.int64).reshape(-1, 4).T
    return Reuse(
        block_size=block_size,
        is_admitted=is_admitted,
        num_queried=num_queried,
        num_new=num_new,
        request=requests,
        previous=previous,
        smallest_pool=smallest,
        num_blocks=lengths,
        fills_up_to=stack.fills_up_to,
    )


def _num_block_names(trace: Trace, block_size: int) -> int:
    return (trace.num_keys + 1) * max(1, trace.trace_block // block_size)


def _block_names(trace: Trace, request: TraceRequest, block_size: int) -> Column:
    """A number for each full block of a prompt, equal where content and all before it are."""
    num_full = request.num_tokens // block_size
    if block_size >= trace.trace_block:
        step = block_size // trace.trace_block
        return request.keys[step - 1 : num_full * step : step].astype(np.int64)
    parts = trace.trace_block // block_size
    firsts = request.keys[: -(-num_full // parts)].astype(np.int64) * parts
    names: Column = np.add.outer(firsts, np.arange(parts)).reshape(-1)[:num_full]
    return names


class _Stack:
    """All blocks so far by last use: requests in order, each with the blocks that are still its."""

    def __init__(self, num_requests: int, num_block_names: int) -> None:
        self.runs: list[tuple[int, int, int, int]] = []
        self.fills_up_to = 0.0
        self._last_request = np.full(num_block_names, _NEVER, dtype=np.int32)
        self._num_blocks = 0
        self._counts = _PrefixSums(num_requests)

    def push(self, index: int, blocks: Column, has_tail: bool) -> int:
        """A request asks for blocks, in order. Returns how many are new."""
        owners = self._last_request[blocks]
        self._last_request[blocks] = index
        # Descending: a block's parent was used last when it was, or later.
        num_seen = len(owners) - int(np.count_nonzero(owners == _NEVER))
        deepest = self._add_runs(index, owners[:num_seen]) if num_seen else 0
        num_new = len(blocks) - num_seen
        self._counts.add(index, len(blocks))
        self._num_blocks += num_new
        if has_tail:
            self.fills_up_to = 0.0
        else:
            self.fills_up_to = max(self.fills_up_to, float("inf") if num_new else deepest)
        return num_new

    def _add_runs(self, index: int, owners: npt.NDArray[np.int32]) -> int:
        """Record the runs of the blocks seen before; returns the largest distance of them."""
        taken: list[tuple[int, int]] = []
        distance = 0
        ends = [*(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), len(owners)]
        for start, end in pairwise((0, *ends)):
            owner, length = int(owners[start]), end - start
            first = self._num_blocks - self._counts.up_to(owner) + 1
            distance = first + length - 1
            # Up to `fills_up_to`, a pool of as many blocks as the distance has them all cached.
            num_exact = int(min(max(self.fills_up_to - first + 1, 0), length))
            if num_exact:
                self.runs.append((index, owner, first, num_exact))
            if num_exact < length:
                rest = first + num_exact + 1
                self.runs.append((index, owner, rest, length - num_exact))
            taken.append((owner, length))
        for owner, length in taken:
            self._counts.add(owner, -length)
        return distance


class _PrefixSums:
    """Sums of the first entries of a list of integers that changes: a Fenwick tree."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, index: int, change: int) -> None:
        index += 1
        while index < len(self._tree):
            self._tree[index] += change
            index += index & -index

    def up_to(self, index: int) -> int:
        """Of entries 0 to `index`, that one included."""
        total, index = 0, index + 1
        while index:
            total += self._tree[index]
            index -= index & -index
        return total
