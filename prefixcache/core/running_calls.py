"""Calls that run outside the lock: attention, and copies of blocks.

Each has a beginning and an end under the core's lock. In between, its sequences keep their blocks,
whatever ends or expires, and refuse the calls that would change them. What runs there is
`prefixcache.engine`'s affair; here is checked whether it may, and what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from prefixcache.core import growth
from prefixcache.core.live import LiveSequences
from prefixcache.core.pool import Pool
from prefixcache.core.progress import Progress
from prefixcache.core.sequence import Sequence
from prefixcache.errors import BeyondTokensError, InvalidArgumentError, SequenceBusyError
from prefixcache.types import BlockCopy, BlockIds


class AttentionRow(NamedTuple):
    """One sequence's part of a running attention call, a copy that stays valid while it runs.

    Tokens `[start_position, start_position + num_tokens)` attend; K/V of those at or after
    `first_writable` are written.
    """

    sequence: Sequence
    start_position: int
    num_tokens: int
    first_writable: int
    block_table: BlockIds
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class AttentionTicket:
    """A running attention call: its blocks stay until `end_attention` takes it back."""

    owner: bytes
    layer: int
    rows: tuple[AttentionRow, ...]


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """Copy-on-write under way: the sequences stay still until `end_copies` takes it back."""

    sequences: tuple[Sequence, ...]
    copies: tuple[BlockCopy, ...]


class RunningCalls:
    def __init__(self, pool: Pool, live: LiveSequences, progress: Progress) -> None:
        self._pool = pool
        self._live = live
        self._progress = progress

    def begin_attention(
        self,
        owner: bytes,
        layer: int,
        sequence_ids: list[int],
        start_positions: list[int],
        num_tokens: list[int],
    ) -> AttentionTicket:
        """Check a whole batch, then hold its sequences until `end_attention`.

        A repeat of the last applied call of the layer gets a row that writes nothing. Raises
        SequenceNotFoundError, SequenceBusyError, WrongPositionError, BeyondTokensError, or
        InvalidArgumentError for an id that stands twice.
        """
        self._live.touch(owner)
        if len(set(sequence_ids)) < len(sequence_ids):
            raise InvalidArgumentError("sequence_ids", "holds one sequence twice")
        size = self._pool.block_size
        rows = tuple(
            _attention_row(self._live.find(owner, sequence_id), layer, start, count, size)
            for sequence_id, start, count in zip(
                sequence_ids, start_positions, num_tokens, strict=True
            )
        )
        for row in rows:
            sequence = row.sequence
            growth.release_copy_holds(self._pool, sequence)
            sequence.last_call = sequence.last_reply = sequence.commit_before = None
            sequence.running_layers.add(layer)
        return AttentionTicket(owner, layer, rows)

    def end_attention(self, ticket: AttentionTicket, *, written: bool) -> None:
        """Take a batch back. `written`: its K/V are in place, so the layer has advanced."""
        self._live.call_ended(ticket.owner)
        for row in ticket.rows:
            sequence = row.sequence
            sequence.running_layers.discard(ticket.layer)
            alive = self._live.is_alive(sequence)
            if written and alive and not row.is_repeat:
                sequence.last_attention_start[ticket.layer] = row.start_position
                self._progress.advance(sequence, ticket.layer, row.start_position + row.num_tokens)
            self._live.bury_if_idle(sequence)

    def begin_copies(self, owner: bytes, sequence_ids: Iterable[int]) -> CopyTicket:
        """Keep sequences still while their pending copies run outside the lock.

        sequence_ids: those that an `append` has just applied to, a repeat or not; only copies
        that have not been made yet are pending.
        """
        sequences = [self._live.find(owner, sequence_id) for sequence_id in sequence_ids]
        pending = tuple(sequence for sequence in sequences if sequence.copy_holds)
        copies: list[BlockCopy] = []
        for sequence in pending:
            sequence.is_copying = True
            copies += sequence.last_reply.copies
        return CopyTicket(pending, tuple(copies))

    def end_copies(self, ticket: CopyTicket) -> None:
        """The copies are done: their sources need no hold any more."""
        for sequence in ticket.sequences:
            sequence.is_copying = False
            if self._live.is_alive(sequence):
                growth.release_copy_holds(self._pool, sequence)
            self._live.bury_if_idle(sequence)


def _attention_row(
    sequence: Sequence, layer: int, start: int, num_tokens: int, block_size: int
) -> AttentionRow:
    """What an attention call of one layer may do with a sequence. Changes nothing.

    Raises SequenceBusyError, WrongPositionError or BeyondTokensError. The layer's last
    applied call once more gets a row that writes nothing.
    """
    if sequence.is_copying or layer in sequence.running_layers:
        raise SequenceBusyError(sequence.sequence_id)
    computed, end = sequence.computed[layer], start + num_tokens
    first_writable = sequence.first_writable
    is_repeat = computed == end and sequence.last_attention_start.get(layer) == start
    if is_repeat:
        first_writable = end
    else:
        growth.check_position(sequence, start, computed)
        limit = len(sequence.token_ids) + sequence.num_lookahead_tokens
        if end > limit:
            raise BeyondTokensError(sequence.sequence_id, end, limit)
    blocks = sequence.blocks(0, -(-end // block_size))
    return AttentionRow(sequence, start, num_tokens, first_writable, blocks, is_repeat)
