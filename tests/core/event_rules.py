"""A state machine whose pool tells events: a mirror made of them is the index, step by step."""

from __future__ import annotations

from hypothesis.stateful import invariant

from prefixcache.core.events import MIN_BUFFER_BYTES, EventLog
from tests.core.machine import BlockManagerMachine, sha256
from tests.support.mirror import Mirror, index_of, snapshot_of


class EventRules(BlockManagerMachine):
    """Goes before a machine, whose pool it gives a log of events."""

    def make_events(self) -> EventLog:
        self.mirror = Mirror()
        self.next_number = 0
        return EventLog(MIN_BUFFER_BYTES, clock=lambda: 7.0)

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "model"):
            return
        super().invariants_hold()
        pool = self.sequences.pool
        assert pool.events is not None
        for event in pool.events.read(self.next_number):
            assert (event.number, event.time_s) == (self.next_number, 7.0)
            self.next_number += 1
            self.mirror.apply(event.change, pool.digest_bytes)
        assert self.next_number == pool.events.next_number
        assert self.mirror.parent_of.keys() == index_of(pool)
        assert snapshot_of(pool).parent_of == self.mirror.parent_of
        if self.digest is sha256:
            none_hash = self.sequences.hasher.none_hash
            for block_hash, parent in self.mirror.parent_of.items():
                assert self.parent_of[block_hash] == (none_hash if parent is None else parent)
