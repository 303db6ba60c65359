"""How far sequences are computed, and what becomes findable as they get on.

Each layer of a sequence has its own count of computed tokens; what all of them have passed is
committed. Owns the count of prompt tokens that were computed, and tells those that wait for pending
blocks. Guarded by the core's lock.
"""

from __future__ import annotations

from prefixcache.core import growth
from prefixcache.core.pending import PendingBlocks
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import Sequence
from prefixcache.core.stats import Counters


class Progress:
    def __init__(self, pool: Pool, pending: PendingBlocks, counters: Counters) -> None:
        self._pool = pool
        self._pending = pending
        self._counters = counters

    def advance(self, sequence: Sequence, layer: int, position: int) -> None:
        """One layer has K/V up to `position` now, and commits what it was the last to complete."""
        computed = sequence.computed
        before, computed[layer] = computed[layer], position
        num_computed = min(computed)
        # The least of all layers was that of this one, or is what it is now.
        self._complete(sequence, min(before, num_computed), num_computed)

    def advance_all(self, sequence: Sequence, position: int) -> None:
        """Every layer has K/V up to `position` at least."""
        before = sequence.num_computed
        sequence.computed = [max(count, position) for count in sequence.computed]
        self._complete(sequence, before, sequence.num_computed)

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """`growth.commit`; who waits for those blocks is told."""
        start, registers = sequence.num_cached_blocks, sequence.registers
        growth.commit(self._pool, sequence, num_computed)
        if sequence.num_cached_blocks > start or sequence.registers != registers:
            self._pending.advance(sequence, start)

    def _complete(self, sequence: Sequence, before: int, num_computed: int) -> None:
        """before: tokens with K/V in all layers until now."""
        prompt_end = sequence.num_prompt_tokens
        if before < prompt_end:
            self._counters.prefill_tokens_computed += min(num_computed, prompt_end) - before
        self.commit(sequence, num_computed)
