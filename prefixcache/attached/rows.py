"""Which tokens of which sequences a call on a view computes: the checks that the daemon makes in
`begin_attention`, made from what the client knows of its sequences. No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.client.columns import uint32_column
from prefixcache.client.lease import Lease
from prefixcache.client.sequence_calls import check_distinct, check_length
from prefixcache.client.sequence_state import SequenceState, SequenceView
from prefixcache.errors import (
    BeyondTokensError,
    FailedPreconditionError,
    InvalidArgumentError,
    ReadOnlyViewError,
    SequenceNotFoundError,
)
from prefixcache.types import BlockIds


@dataclass(frozen=True, slots=True)
class CallRows:
    """Columns of a call, one entry a sequence; K/V of positions below `first_writable` stay."""

    states: list[SequenceState]
    block_tables: list[BlockIds]
    start_positions: list[int]
    num_tokens: list[int]

    @property
    def sequence_ids(self) -> list[int]:
        return [state.sequence_id for state in self.states]

    @property
    def first_writable(self) -> list[int]:
        return [state.first_writable for state in self.states]

    @property
    def writes(self) -> bool:
        """Whether there is a token whose K/V are to be written."""
        return any(map(_writes, self.states, self.start_positions, self.num_tokens))

    def check_nothing_to_write(self) -> None:
        """Raises ReadOnlyViewError."""
        for state, start, count in zip(
            self.states, self.start_positions, self.num_tokens, strict=True
        ):
            if _writes(state, start, count):
                raise ReadOnlyViewError(state.sequence_id, max(start, state.first_writable))

    def computed(self, layer: int) -> None:
        """The layer has computed them. Raises SequenceNotFoundError if one was freed meanwhile:
        its blocks may have been another's.
        """
        _check_not_freed(self.states)
        for state, start, count in zip(
            self.states, self.start_positions, self.num_tokens, strict=True
        ):
            state.written(layer, start + count)


def rows_of(
    sequences: Sequence[SequenceView], lease: Lease, layer: int, num_tokens: npt.ArrayLike
) -> CallRows:
    """The next `num_tokens` tokens of each sequence, from where the layer stands.

    lease: whose sequences they must be. layer: one that there is. Raises SequenceNotFoundError,
    BeyondTokensError, FailedPreconditionError, or InvalidArgumentError.
    """
    if not sequences:
        raise InvalidArgumentError("sequence_ids", "is empty")
    states = [sequence._state for sequence in sequences]
    counts = uint32_column(num_tokens, "num_tokens").tolist()
    check_length(counts, "num_tokens", states)
    if 0 in counts:
        raise InvalidArgumentError("num_tokens", "is 0 in some row")
    check_distinct(states)
    if any(sequence._lease is not lease for sequence in sequences):
        raise FailedPreconditionError("a sequence is not of the session that is attached")
    _check_not_freed(states)
    starts = [state.position(layer) for state in states]
    tables = []
    for state, start, count in zip(states, starts, counts, strict=True):
        end, limit = start + count, state.num_tokens + state.num_lookahead_tokens
        if end > limit:
            raise BeyondTokensError(state.sequence_id, end, limit)
        num_blocks = -(-end // state.block_size)
        tables.append(np.frombuffer(state.block_table[:num_blocks], dtype=np.int32))
    return CallRows(states, tables, starts, counts)


def _writes(state: SequenceState, start: int, count: int) -> bool:
    return start + count > state.first_writable


def _check_not_freed(states: list[SequenceState]) -> None:
    for state in states:
        if state.is_freed:
            raise SequenceNotFoundError(state.sequence_id)
