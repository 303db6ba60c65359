"""Which tokens of which sequences a call on a view computes: the checks that the daemon makes in
`begin_attention`, made from what the client knows of its sequences, and the batch for the kernels.

The layers of a step come one after another with the same sequences, which stand at the same place
in each. So what is planned for one is remembered for the next.

Threads: safe. Plans are immutable, and two threads that miss at once both make one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.step_batches import NUM_STEPS
from prefixcache.client.columns import uint32_column
from prefixcache.client.lease import Lease
from prefixcache.client.sequence_calls import check_distinct, check_length
from prefixcache.client.sequence_state import SequenceState, SequenceView
from prefixcache.errors import (
    BeyondTokensError,
    FailedPreconditionError,
    InvalidArgumentError,
    ReadOnlyViewError,
)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call: the next tokens of some sequences, from where one layer stands.

    ends: where the layer stands after it, one a sequence. num_tokens: of all of them. writes:
    whether there is a token whose K/V are to be written.
    """

    states: list[SequenceState]
    ends: list[int]
    num_tokens: int
    batch: AttentionBatch
    writes: bool

    def check_nothing_to_write(self) -> None:
        """Raises ReadOnlyViewError."""
        for state, end in zip(self.states, self.ends, strict=True):
            if end > state.first_writable:
                raise ReadOnlyViewError(state.sequence_id, state.first_writable)

    def done(self, layer: int) -> None:
        """The layer has computed them."""
        for state, end in zip(self.states, self.ends, strict=True):
            state.written(layer, end)


class CallPlanner:
    """lease: of all sequences. on_new_step: called before what is not remembered is planned.

    It keeps the plans of the last few steps.
    """

    def __init__(self, lease: Lease, block_size: int, on_new_step: Callable[[], None]) -> None:
        self._lease = lease
        self._on_new_step = on_new_step
        self._block_size = block_size
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, PlannedCall] = OrderedDict()

    def plan(
        self, sequences: Sequence[SequenceView], layer: int, num_tokens: npt.ArrayLike | None
    ) -> PlannedCall:
        """The next `num_tokens` of each sequence, one if None.

        layer: one that there is. Raises BeyondTokensError, FailedPreconditionError, or
        InvalidArgumentError.
        """
        if num_tokens is None:
            counts = [1] * len(sequences)
        else:
            counts = uint32_column(num_tokens, "num_tokens").tolist()
        # In one go, as it is done for each layer: after attention the processor's caches are cold.
        key = (
            tuple(
                [
                    (one._lease, (state := one._state), state.version, state.computed[layer])
                    for one in sequences
                ]
            ),
            tuple(counts),
        )
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        self._on_new_step()
        plan = self._make(sequences, layer, counts)
        with self._lock:
            self._plans[key] = plan
            if len(self._plans) > NUM_STEPS:
                self._plans.popitem(last=False)
        return plan

    def _make(
        self, sequences: Sequence[SequenceView], layer: int, counts: list[int]
    ) -> PlannedCall:
        if not sequences:
            raise InvalidArgumentError("sequence_ids", "is empty")
        if any(sequence._lease is not self._lease for sequence in sequences):
            raise FailedPreconditionError("a sequence is not of the session that is attached")
        states, size = [sequence._state for sequence in sequences], self._block_size
        check_length(counts, "num_tokens", states)
        if 0 in counts:
            raise InvalidArgumentError("num_tokens", "is 0 in some row")
        check_distinct(states)
        starts = [state.computed[layer] for state in states]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        tables = []
        for state, end in zip(states, ends, strict=True):
            limit = state.num_tokens + state.num_lookahead_tokens
            if end > limit:
                raise BeyondTokensError(state.sequence_id, end, limit)
            tables.append(np.frombuffer(state.block_table[: -(-end // size)], dtype=np.int32))
        first_writable = [state.first_writable for state in states]
        return PlannedCall(
            states=states,
            ends=ends,
            num_tokens=sum(counts),
            batch=make_batch(tables, starts, counts, first_writable, size),
            writes=any(end > first for end, first in zip(ends, first_writable, strict=True)),
        )
