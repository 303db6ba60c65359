"""The naive block manager's quarantine: what processes outside may still write to, and do.

A lost session's writers go on from where they stood: at each slot that was theirs to write to and
had not been committed. What they write there is junk to everybody else, so a slot that is anybody's
by then is seen, whatever the rule by which blocks are kept says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tests.support.model_accounts import BLANK, Block


class _Sequence(Protocol):
    table: list[int]
    tokens: list[int]
    computed: list[int]
    first_writable: int


@dataclass
class Quarantined:
    """What one sequence left. writers: processes that could write there."""

    writers: frozenset[int]
    account: int
    block_ids: list[int]


@dataclass
class Stray:
    """A slot that processes were about to write to."""

    writers: frozenset[int]
    block_id: int
    offset: int


class ModelQuarantine:
    """running: the processes that have not ended."""

    size: int
    blocks: list[Block]
    running: set[int]
    quarantine: list[Quarantined]
    strays: list[Stray]

    def num_quarantined(self) -> int:
        return sum(len(kept.block_ids) for kept in self.quarantine)

    def remember_strays(self, sequence: _Sequence, writers: frozenset[int]) -> None:
        self.strays += [
            Stray(writers, sequence.table[position // self.size], position % self.size)
            for position in range(len(sequence.table) * self.size)
            if self._is_unwritten(sequence, position)
            and self._is_only_holder(sequence.table[position // self.size])
        ]

    def unwritten_blocks(self, sequence: _Sequence) -> list[int]:
        """Blocks that nobody else has, with a slot that is not committed."""
        return [
            block_id
            for place, block_id in enumerate(sequence.table)
            if self._is_only_holder(block_id)
            and any(
                self._is_unwritten(sequence, place * self.size + offset)
                for offset in range(self.size)
            )
        ]

    def _is_only_holder(self, block_id: int) -> bool:
        return self.blocks[block_id].refs == 1 and self.blocks[block_id].state == BLANK

    def _is_unwritten(self, sequence: _Sequence, position: int) -> bool:
        is_committed = position < min(*sequence.computed, len(sequence.tokens))
        return position >= sequence.first_writable and not is_committed

    def write_strays(self) -> None:
        """Every process that runs writes to all that it was about to write to."""
        self.strays = [stray for stray in self.strays if stray.writers & self.running]
        for number, stray in enumerate(self.strays, 1):
            for layer in self.blocks[stray.block_id].kv:
                layer[stray.offset] = -1_000_000 - number

    def end_process(self, process: int) -> int:
        """It writes as long as it can; returns how many blocks are free without it."""
        self.write_strays()
        self.running.discard(process)
        ended = [kept for kept in self.quarantine if not kept.writers & self.running]
        self.quarantine = [kept for kept in self.quarantine if kept.writers & self.running]
        for kept in ended:
            self._release(kept.block_ids, kept.account)
        return sum(len(kept.block_ids) for kept in ended)

    def _release(self, block_ids: list[int], account: int) -> None:
        raise NotImplementedError
