"""Events: what becomes cached and what no longer is, numbered, in a buffer of bounded size.

The pool writes them, one for a run of blocks, under the core's lock; readers keep the number that
they are at and read from there, under the lock too. Nobody is waited for: a reader who is slower
than the buffer goes round finds out that the oldest number is above its own.

A dict by number and not a ring of slots: events differ in size a thousandfold, and the limit is
one of bytes.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.types import TokenIds

MAX_EVENT_BYTES = 2**17
"""Longer runs of blocks make several events."""
MIN_BUFFER_BYTES = 2**20
_OVERHEAD_BYTES = 512
"""Of an event's Python objects, all together."""


NO_TOKENS: TokenIds = np.zeros(0, dtype=np.uint32)


class Stored(NamedTuple):
    """A run of blocks became cached, each the parent of the next.

    hashes: one digest after another. parent: hash of the block before the first, None for the start
    of a sequence. token_ids: `[n * B] uint32` of the n blocks; empty if they are not known.
    extra_keys: encoded, one a block, or None for none in any.
    """

    hashes: bytes
    parent: bytes | None
    token_ids: TokenIds = NO_TOKENS
    extra_keys: Sequence[bytes] | None = None


class Removed(NamedTuple):
    """Blocks are cached no more; children come before their parents."""

    hashes: bytes


class Cleared(NamedTuple):
    """No block is cached any more."""


Change = Stored | Removed | Cleared


class Event(NamedTuple):
    """time_s: since 1970. num_bytes: what it counts in the buffer."""

    number: int
    time_s: float
    change: Change
    num_bytes: int


class Reader(enum.StrEnum):
    """How somebody reads the events."""

    WATCH = "watch"
    ZMQ = "zmq"


class EventLog:
    """The last events, of at most `max_bytes` together. A run that is cut stays in memory whole.

    max_event_bytes: of one, unless it has a single block; less where messages must be smaller.

    Numbers go from 0 without gaps; those of `[first_number, next_number)` are there. num_gaps: how
    often a reader was too slow and missed some. Guarded by the core's lock.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_event_bytes: int = MAX_EVENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < MIN_BUFFER_BYTES:
            raise ValueError(f"a buffer of {max_bytes} bytes, must be {MIN_BUFFER_BYTES}+")
        self.first_number = 0
        self.next_number = 0
        self.num_bytes = 0
        self.num_gaps = Counter[Reader]()
        self.max_event_bytes = max_event_bytes
        self._max_bytes = max_bytes
        self._clock = clock
        self._events: dict[int, Event] = {}
        self._waiting: dict[Callable[[], object], None] = {}

    # ---- the pool's side

    def stored(
        self,
        hashes: bytes,
        digest_bytes: int,
        parent: bytes | None,
        token_ids: TokenIds,
        extra_keys: Sequence[bytes] | None,
    ) -> None:
        """token_ids: `[n * B] uint32` of the n blocks; kept, so nobody may change it."""
        num_blocks = len(hashes) // digest_bytes
        size = len(token_ids) // num_blocks
        largest = digest_bytes + 4 * size + max(map(len, extra_keys or [b""]))
        step = max(1, self.max_event_bytes // largest)
        for first in range(0, num_blocks, step):
            end = min(first + step, num_blocks)
            run = hashes[first * digest_bytes : end * digest_bytes]
            keys = extra_keys[first:end] if extra_keys is not None else None
            if keys is not None and not any(keys):
                keys = None
            self._append(
                Stored(run, parent, token_ids[first * size : end * size], keys),
                len(run) + (end - first) * 4 * size + sum(map(len, keys or ())),
            )
            parent = run[-digest_bytes:]

    def removed(self, hashes: bytes, digest_bytes: int) -> None:
        step = self.max_event_bytes // digest_bytes * digest_bytes
        for first in range(0, len(hashes), step):
            run = hashes[first : first + step]
            self._append(Removed(run), len(run))

    def cleared(self) -> None:
        self._append(Cleared(), 0)

    # ---- readers

    def read(self, number: int, max_bytes: int | None = None) -> list[Event]:
        """Events from that number, or the first one after it that is there, on.

        At least one if there is any, and more as long as all are of `max_bytes` together, which is
        `max_event_bytes` if left out.
        """
        limit = self.max_event_bytes if max_bytes is None else max_bytes
        return list(self._read(max(number, self.first_number), limit))

    def wake_at_next(self, wake: Callable[[], object]) -> None:
        """Call `wake` once, under the lock, when there is another event. It must not wait."""
        self._waiting[wake] = None

    def forget(self, wake: Callable[[], object]) -> None:
        self._waiting.pop(wake, None)

    # ---- inside

    def _read(self, number: int, left_bytes: int) -> Iterator[Event]:
        for index in range(number, self.next_number):
            event = self._events[index]
            left_bytes -= event.num_bytes
            if left_bytes < 0 and index > number:
                return
            yield event

    def _append(self, change: Change, num_bytes: int) -> None:
        num_bytes += _OVERHEAD_BYTES
        number, events = self.next_number, self._events
        events[number] = Event(number, self._clock(), change, num_bytes)
        self.next_number = number + 1
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= events.pop(self.first_number).num_bytes
            self.first_number += 1
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()
