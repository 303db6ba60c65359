"""Events of the cache as a client reads them, and how responses become them. No I/O.

They come in order: a snapshot, unless none is wanted, then changes without gaps. After an
`EventsLost` comes another snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import cbor2
import numpy as np

from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc.wire import read_column32, twin
from prefixcache.types import TokenIds

ExtraKey: TypeAlias = tuple[str | int | bytes, ...]
"""One tagged extra key, such as `("lora", name, path)`, as the hash of a block has it."""

_MAX_NUMBER = 2**64 - 1
_NO_TOKENS: TokenIds = np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class SnapshotStarted:
    """What was known before is no longer true; `BlocksStored` with what is cached follow."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """The snapshot is whole. number: of the first change after it."""

    number: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks became cached, each the parent of the next.

    number: of the change; None in a snapshot. time_s: when it was, since 1970; 0 in a snapshot.
    parent_hash: of the block before the first; None at the start of a sequence.
    token_ids: `[len(block_hashes) * block_size] uint32`; none in a snapshot.
    extra_keys: one entry a block; empty if no block has any, and in a snapshot.
    """

    number: int | None
    time_s: float
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    block_size: int
    token_ids: TokenIds
    extra_keys: tuple[tuple[ExtraKey, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks were evicted; children come before their parents."""

    number: int
    time_s: float
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block is cached any more: the cache was reset."""

    number: int
    time_s: float


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Changes `[number, end_number)` were lost: the reader was too slow for the daemon's buffer."""

    number: int
    end_number: int


CacheEvent: TypeAlias = (
    SnapshotStarted | SnapshotEnded | BlocksStored | BlocksRemoved | CacheCleared | EventsLost
)


@dataclass(frozen=True, slots=True)
class EventPosition:
    """Where a stream can begin: the number of the first change wanted.

    boot_id: of the start of the daemon that it is of; empty if that is not to be checked.
    """

    number: int
    boot_id: bytes = b""


def request(start: EventPosition | None, snapshot: bool) -> Any:
    """The request of a stream. Raises InvalidArgumentError."""
    message = twin("WatchEventsRequest")(without_snapshot=not snapshot)
    if start is not None:
        if not 0 <= start.number <= _MAX_NUMBER:
            raise InvalidArgumentError("from_number", f"is {start.number}, must be 0 to 2^64 - 1")
        message.from_number, message.boot_id = start.number, start.boot_id
    return message


class EventReader:
    """Turns the responses of one stream into events.

    position: where another stream can go on after the events that were taken. None before the
    first response, and in a snapshot.
    """

    def __init__(self) -> None:
        self.position: EventPosition | None = None
        self._in_snapshot = False

    def events_of(self, response: Any) -> Iterator[CacheEvent]:
        """To be taken one by one, before those of the next response."""
        boot_id = response.boot_id
        if not response.events:
            self.position = EventPosition(response.next_number, boot_id)
        for message in response.events:
            event = self._event_of(message)
            number: int | None
            match event:
                case SnapshotStarted():
                    self._in_snapshot, number = True, None
                case SnapshotEnded(number):
                    self._in_snapshot = False
                case EventsLost(_, number):
                    pass
                case _:
                    number = None if event.number is None else event.number + 1
            self.position = None if number is None else EventPosition(number, boot_id)
            yield event

    def _event_of(self, message: Any) -> CacheEvent:
        number, time_s = message.number, message.time_s
        match message.WhichOneof("event"):
            case "snapshot_started":
                return SnapshotStarted(message.snapshot_started.num_blocks)
            case "snapshot_ended":
                return SnapshotEnded(number)
            case "removed":
                return BlocksRemoved(number, time_s, tuple(message.removed.block_hashes))
            case "cleared":
                return CacheCleared(number, time_s)
            case "lost":
                return EventsLost(number, message.lost.end_number)
        stored = message.stored
        return BlocksStored(
            None if self._in_snapshot else number,
            time_s,
            tuple(stored.block_hashes),
            stored.parent_hash or None,
            stored.block_size,
            read_column32(stored.token_ids) if stored.token_ids else _NO_TOKENS,
            tuple(_decoded(keys) for keys in stored.extra_keys),
        )


def _decoded(keys: bytes) -> tuple[ExtraKey, ...]:
    return tuple(tuple(key) for key in cbor2.loads(keys)) if keys else ()
