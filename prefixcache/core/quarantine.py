"""Blocks that no sequence has any more, and that a process outside may still write to.

An attached client writes K/V into the pool's memory itself. A mapping cannot be taken back: a
process that stood still until its session was over writes, once it goes on, where it was about to,
and so may a thread while another one closes the session. So what its sequences had not committed is
given to nobody until that process has ended, or has said itself that it has no mapping any more.
Until then a block here is neither free nor findable, and it stays charged to its account. What was
committed goes the usual way: an honest writer has done with it. Guarded by the core's lock.

Rejected: to end such a session later (others would wait for its cached blocks too, and it could
come back to sequences that others count as gone).
"""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.core import growth
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import Sequence
from prefixcache.types import BlockIds


class _Held(NamedTuple):
    """What one sequence left. writers: attachments that may still write there, others' too."""

    writers: set[int]
    account: int
    block_ids: BlockIds


class Quarantine:
    """Holds a reference on each of its blocks; the pool counts them apart."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._held: list[_Held] = []

    @property
    def block_ids(self) -> list[int]:
        """Oldest first."""
        return [block for held in self._held for block in held.block_ids.tolist()]

    def give_back(self, sequence: Sequence, writers: set[int]) -> None:
        """Give back an ended sequence's blocks, but for those that its writers may still write to.

        writers: attachments, one at least; `end_writer` takes those out that are gone.
        """
        block_ids = growth.release_written(self._pool, sequence)
        if len(block_ids):
            self._held.append(_Held(writers, sequence.account, block_ids))

    def end_writer(self, attachment: int) -> int:
        """Free what only this attachment could still write to; returns how many blocks."""
        num_freed = 0
        still = []
        for held in self._held:
            held.writers.discard(attachment)
            if held.writers:
                still.append(held)
            else:
                self._pool.end_quarantine(held.block_ids, held.account)
                num_freed += len(held.block_ids)
        self._held = still
        return num_freed
