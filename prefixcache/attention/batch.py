"""Which tokens of which sequences one attention call computes, as arrays.

Owns the arrays and how they are derived from block tables. Imports no torch: the same batch serves
every layer and every kernel. Immutable by convention once made, so threads may share it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from prefixcache.attention.shared_prefix import SharedPrefix, plan_shared_prefix
from prefixcache.core.form import is_compiled
from prefixcache.errors import InvalidArgumentError

_make_arrays = None
if is_compiled("prefixcache.attention.native.batch"):
    from prefixcache.attention.native.batch import make_arrays

    _make_arrays = make_arrays

Derived = TypeVar("Derived")


class PrefixSharing(enum.Enum):
    """Whether blocks that several sequences of a batch have at their start are read once."""

    AUTO = enum.auto()
    """Where it pays."""
    NEVER = enum.auto()
    """Each sequence reads all of its own: what AUTO is compared with."""
    ALWAYS = enum.auto()
    """Wherever two sequences share a block, whether it pays or not."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S sequences with T new tokens together; the tokens of one sequence are consecutive.

    The launchers check it (`checks.check_batch`), so a batch may also be built by hand.
    """

    block_tables: npt.NDArray[np.int32]
    """`[S, max_blocks]` block ids. Entries past `ceil(seq_len / B)` are never read."""
    query_start: npt.NDArray[np.int32]
    """`[S + 1]` where each sequence's new tokens start; the last entry is T."""
    context_lens: npt.NDArray[np.int32]
    """`[S]` tokens before the new ones."""
    seq_lens: npt.NDArray[np.int32]
    """`[S]` tokens including the new ones."""
    slot_mapping: npt.NDArray[np.int64]
    """`[T]` slot of each new token; -1: its K/V are in the cache already, do not write them."""
    prefix_sharing: PrefixSharing = PrefixSharing.AUTO
    """Anything but AUTO is for tests and measurements."""
    _derived: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def shared_prefix(self, block_size: int) -> SharedPrefix | None:
        """The plan to read shared blocks once, made at the first call; None where it saves nothing.

        The batch has been checked.
        """
        if self.prefix_sharing is PrefixSharing.NEVER:
            return None
        return self.derive(
            ("shared_prefix", block_size),
            lambda: (
                plan_shared_prefix(self, block_size)
                if self.prefix_sharing is PrefixSharing.AUTO
                else plan_shared_prefix(self, block_size, min_saved_tokens=0)
            ),
        )

    def derive(self, name: Hashable, make: Callable[[], Derived]) -> Derived:
        """What `make` makes of the batch, kept under `name`: made once a step, used in every layer.

        Two threads at once may both make it, and either result is kept.
        """
        if name not in self._derived:
            self._derived[name] = make()
        return cast(Derived, self._derived[name])


def make_batch(
    block_tables: Sequence[npt.NDArray[np.int32]],
    start_positions: Sequence[int],
    num_tokens: Sequence[int],
    first_writable: Sequence[int],
    block_size: int,
) -> AttentionBatch:
    """The batch that computes `num_tokens` tokens of each sequence from its start position on.

    All arguments have one entry per sequence. Tokens at positions below `first_writable` get
    slot -1. A table may be longer than needed.

    Raises InvalidArgumentError if the lengths differ, a number is negative, the block size is
    below 1, or a table is too short for its tokens.
    """
    if _make_arrays is not None:
        arrays = _make_arrays(block_tables, start_positions, num_tokens, first_writable, block_size)
        if arrays is not None:
            return AttentionBatch(*arrays)
    return make_batch_in_numpy(
        block_tables, start_positions, num_tokens, first_writable, block_size
    )


def make_batch_in_numpy(
    block_tables: Sequence[npt.NDArray[np.int32]],
    start_positions: Sequence[int],
    num_tokens: Sequence[int],
    first_writable: Sequence[int],
    block_size: int,
) -> AttentionBatch:
    """`make_batch` without compiled code, which does not say what it refuses."""
    if block_size < 1:
        raise InvalidArgumentError("block_size", f"must be >= 1, is {block_size}")
    num_sequences = len(block_tables)
    contexts = _as_column("start_positions", start_positions, num_sequences)
    queries = _as_column("num_tokens", num_tokens, num_sequences)
    writable = _as_column("first_writable", first_writable, num_sequences)
    seq_lens = contexts + queries
    query_start = np.concatenate([[0], np.cumsum(queries)])
    if max(seq_lens.max(initial=0), query_start[-1]) > np.iinfo(np.int32).max:
        raise InvalidArgumentError("num_tokens", "more than 2**31 - 1 tokens")
    tables = _pad_tables(block_tables, -(-seq_lens // block_size))

    sequence = np.repeat(np.arange(num_sequences), queries)
    positions = np.arange(query_start[-1]) + (contexts - query_start[:-1])[sequence]
    block_ids = tables[sequence, positions // block_size].astype(np.int64)
    slots = block_ids * block_size + positions % block_size
    slots[positions < writable[sequence]] = -1
    return AttentionBatch(
        block_tables=tables,
        query_start=query_start.astype(np.int32),
        context_lens=contexts.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        slot_mapping=slots,
    )


def _as_column(field: str, numbers: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    column = np.asarray(numbers, dtype=np.int64)
    if column.shape != (length,):
        raise InvalidArgumentError(field, f"{column.size} entries for {length} block tables")
    if length and column.min() < 0:
        raise InvalidArgumentError(field, f"must be >= 0, is {column.min()}")
    return column


def _pad_tables(
    block_tables: Sequence[npt.NDArray[np.int32]], num_used: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    for row, (table, used) in enumerate(zip(block_tables, num_used.tolist(), strict=True)):
        if len(table) < used:
            raise InvalidArgumentError(
                "block_tables", f"sequence {row} needs {used} blocks, its table has {len(table)}"
            )
    # Not before: a wrong position would ask for any amount of memory.
    padded = np.full((len(block_tables), num_used.max(initial=0)), -1, dtype=np.int32)
    for row, (table, used) in enumerate(zip(block_tables, num_used.tolist(), strict=True)):
        padded[row, :used] = table[:used]
    return padded
