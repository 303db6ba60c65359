"""The order in which free blocks are reused.

Owns nothing but the order: which blocks are free is the pool's business. The head is taken next;
the tail was used last. Not thread-safe: the core's lock guards it.

The queue is a ring of block ids with lazy deletion. `_position[block]` is the block's place in
the order, and a ring entry counts only while it is that place, so a block leaves the middle of
the queue by forgetting its position, and every operation on many blocks is a few numpy calls.
Stale entries are squeezed out when the ring is full; it holds twice the blocks, so that costs a
constant amount per entry written. Queues that a block is in one of at a time share the positions:
each has its own range of them. Rejected: a doubly linked list in columns (each step is a
scalar numpy access, about 100 ns) and an OrderedDict (a Python object a block).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixcache.types import BlockIds

_ABSENT = np.iinfo(np.int64).min
_MIN_SCAN = 64
_MIN_CAPACITY = 128
_POSITIONS_A_QUEUE = 1 << 48


class FreeQueue:
    """Block ids `0 ..< num_blocks`, at first all of them in that order."""

    def __init__(self, num_blocks: int) -> None:
        # A power of two, so that a position (which may be negative) maps to its ring entry by
        # a mask; more than num_blocks, so that squeezing always makes room.
        capacity = 1 << (2 * num_blocks).bit_length()
        self._mask = capacity - 1
        self._ring: BlockIds = np.zeros(capacity, dtype=np.int32)
        self._ring[:num_blocks] = np.arange(num_blocks, dtype=np.int32)
        self._position: npt.NDArray[np.int64] = np.arange(num_blocks, dtype=np.int64)
        self._first = 0
        self._head = 0
        self._tail = num_blocks
        self._length = num_blocks

    def another(self, number: int) -> FreeQueue:
        """An empty queue of blocks that are in none; this one has number 0."""
        queue = FreeQueue.__new__(FreeQueue)
        queue._mask = _MIN_CAPACITY - 1
        queue._ring = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        queue._position = self._position
        queue._first = queue._head = queue._tail = number * _POSITIONS_A_QUEUE
        queue._length = 0
        return queue

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_id: int) -> bool:
        return bool(self._position[block_id] != _ABSENT)

    def push_tail(self, block_ids: BlockIds) -> None:
        """Add blocks that are not in the queue; the last one becomes the tail."""
        count = len(block_ids)
        if not count:
            return
        self._make_room(count)
        self._write(self._tail, block_ids)
        self._tail += count
        self._length += count

    def push_head(self, block_ids: BlockIds) -> None:
        """Add blocks that are not in the queue; the first one becomes the head."""
        count = len(block_ids)
        if not count:
            return
        self._make_room(count)
        self._head -= count
        self._write(self._head, block_ids)
        self._length += count

    def remove(self, block_ids: BlockIds) -> None:
        """Take distinct blocks that are in the queue out of it, wherever they stand."""
        self._position[block_ids] = _ABSENT
        self._length -= len(block_ids)

    def peek_head(self, count: int) -> BlockIds:
        """The first `count` blocks from the head on; `count` is at most the queue's length."""
        assert count <= self._length
        found: list[BlockIds] = []
        position, missing = self._head, count
        while missing:
            end = min(self._tail, position + max(2 * missing, _MIN_SCAN))
            live = self._live(position, end)[:missing]
            found.append(live)
            missing -= len(live)
            position = end
        if not found:
            return np.empty(0, dtype=np.int32)
        blocks = np.concatenate(found)
        # The next call need not pass the stale entries before the head again.
        self._head = int(self._position[blocks[0]])
        return blocks

    def pop_head(self, count: int) -> BlockIds:
        """Take the first `count` blocks; `count` is at most the queue's length."""
        popped = self.peek_head(count)
        if count:
            self._head = int(self._position[popped[-1]]) + 1
            self.remove(popped)
        return popped

    def order(self) -> BlockIds:
        """All blocks from head to tail, `[len] int32`. For tests and inspection."""
        return self._live(self._head, self._tail)

    def _live(self, start: int, end: int) -> BlockIds:
        positions = np.arange(start, end, dtype=np.int64)
        candidates = self._ring[positions & self._mask]
        live: BlockIds = candidates[self._position[candidates] == positions]
        return live

    def _write(self, start: int, block_ids: BlockIds) -> None:
        positions = np.arange(start, start + len(block_ids), dtype=np.int64)
        self._ring[positions & self._mask] = block_ids
        self._position[block_ids] = positions

    def _make_room(self, count: int) -> None:
        if self._tail - self._head + count <= self._mask + 1:
            return
        live = self.order()
        if 2 * (len(live) + count) > self._mask + 1:
            capacity = 1 << (4 * (len(live) + count)).bit_length()
            self._mask = capacity - 1
            self._ring = np.zeros(capacity, dtype=np.int32)
        self._head, self._tail = self._first, self._first + len(live)
        self._write(self._first, live)
