"""The batch of a step, made once and shared by the layers that follow each other.

All layers of a step have the same sequences, positions and block tables, and each is a call of its
own. Making the batch again for every layer costs more than comparing its input; and whatever is
planned for a batch can be planned once if the layers have the same object.

Threads: safe. Batches are immutable, and two threads that miss at once both make one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixcache.attention.batch import AttentionBatch, make_batch

NUM_STEPS = 8
"""Steps that may be under way at a time without losing their batches: one a calling engine."""


class StepBatches:
    """`make_batch` that remembers the last few results."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lock = threading.Lock()
        self._batches: OrderedDict[tuple[tuple[int, ...], ...], tuple[bytes, AttentionBatch]] = (
            OrderedDict()
        )

    def batch_for(
        self,
        sequence_ids: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int32]],
        start_positions: Sequence[int],
        num_tokens: Sequence[int],
        first_writable: Sequence[int],
    ) -> AttentionBatch:
        """The batch that `make_batch` makes of these, the same object while nothing changes.

        sequence_ids keep apart steps of different sequences at equal positions. Raises what
        `make_batch` raises.
        """
        key = (
            tuple(sequence_ids),
            tuple(start_positions),
            tuple(num_tokens),
            tuple(first_writable),
            tuple(map(len, block_tables)),
        )
        tables = b"".join(table.tobytes() for table in block_tables)
        with self._lock:
            known = self._batches.get(key)
            if known is not None and known[0] == tables:
                self._batches.move_to_end(key)
                return known[1]
        batch = make_batch(
            block_tables, start_positions, num_tokens, first_writable, self._block_size
        )
        with self._lock:
            self._batches[key] = (tables, batch)
            self._batches.move_to_end(key)
            if len(self._batches) > NUM_STEPS:
                self._batches.popitem(last=False)
        return batch
