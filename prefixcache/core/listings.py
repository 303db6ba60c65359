"""What operators see of the sequences and sessions that live, a page at a time.

Changes nothing, and renews nobody's time. Guarded by the core's lock; the clock is injected.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from prefixcache.core.live import LiveSequences
from prefixcache.core.sequence import Sequence
from prefixcache.types import SequenceId, SequenceOrder


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What an operator sees of a sequence."""

    serial: int
    sequence_id: SequenceId
    owner: bytes
    account: int
    client_name: str
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What an operator sees of a session."""

    serial: int
    digest: str
    client_name: str
    tenant: str
    ttl_s: float
    left_s: float
    is_connected: bool
    num_sequences: int
    age_s: float


class Listings:
    def __init__(self, live: LiveSequences, clock: Callable[[], float]) -> None:
        self._live = live
        self._clock = clock

    def sequences_after(self, serial: int, count: int) -> list[SequenceInfo]:
        """Up to `count` live sequences, oldest first, allocated after the one of that serial."""
        now = self._clock()
        page: list[SequenceInfo] = []
        for sequence in self._live.by_id.values():
            if len(page) == count:
                break
            if sequence.serial > serial:
                page.append(self._info(sequence, now))
        return page

    def first_sequences(self, order: SequenceOrder, count: int) -> list[SequenceInfo]:
        """Up to `count` live sequences, the first ones in that order; of equals, the older.

        Looks at all of them for MOST_BLOCKS, and keeps no more than `count`.
        """
        now = self._clock()
        alive = self._live.by_id.values()
        match order:
            case SequenceOrder.OLDEST:
                found = list(islice(alive, count))
            case SequenceOrder.NEWEST:
                found = list(islice(reversed(alive), count))
            case SequenceOrder.MOST_BLOCKS:
                found = heapq.nlargest(count, alive, key=_num_blocks)
        return [self._info(sequence, now) for sequence in found]

    def sessions_after(self, serial: int, count: int) -> list[SessionInfo]:
        """Up to `count` sessions, oldest first, opened after the one of that serial."""
        now = self._clock()
        page: list[SessionInfo] = []
        for session in self._live.sessions:
            if len(page) == count:
                break
            if session.serial > serial:
                page.append(
                    SessionInfo(
                        serial=session.serial,
                        digest=session.digest,
                        client_name=session.client_name,
                        tenant=session.tenant,
                        ttl_s=session.ttl_s,
                        left_s=self._live.sessions.seconds_left(session),
                        is_connected=session.stream is not None,
                        num_sequences=self._live.num_sequences_of(session.session_id),
                        age_s=now - session.opened_at_s,
                    )
                )
        return page

    def _info(self, sequence: Sequence, now_s: float) -> SequenceInfo:
        return SequenceInfo(
            serial=sequence.serial,
            sequence_id=sequence.sequence_id,
            owner=sequence.owner,
            account=sequence.account,
            client_name=self._live.client_name(sequence.owner),
            num_tokens=sequence.num_tokens,
            num_computed_tokens=sequence.num_computed,
            num_cached_tokens=sequence.num_cached_tokens,
            num_blocks=len(sequence.block_table),
            age_s=now_s - sequence.created_at_s,
        )


def _num_blocks(sequence: Sequence) -> int:
    return len(sequence.block_table)
