"""Blocks that live sequences are computing now, and calls that wait for them.

A *filler* is a live sequence that may register blocks and has full ones that are not cached yet:
those of its prompt, and of an Append of a block's tokens or more (the blocks that decoding fills
one by one are no help to anybody, and are left out). A block of a prompt is *pending* if it comes
after the prompt's hits and a filler is to compute it.

Block hashes are a chain, so two chains that agree in one block agree in all before it. So nothing
is kept for each block: the fillers' chains stand in one sorted list, in which the one that agrees
longest with a prompt is next to the prompt's own place. That is O(log fillers) comparisons of
bytes, also where all of them have one long system prompt in common, or one of them is behind
another; a dict of the blocks that come next would miss the second, and have one entry for all of
the first. Digests that collide can make a block look pending that is another's. That costs a wait,
never a wrong hit: who has waited looks again.

A waiter is told when the last of the blocks that it waits for is cached, or is not to be computed
by the filler that had it any more: once, and not at each block before. It holds nothing. Guarded by
the core's lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from prefixcache.core.hashing import BlockHashes
from prefixcache.core.sequence import Sequence


@dataclass(eq=False, slots=True)
class _Filler:
    """chain: digests of its blocks, the first `num_cached` of them cached or standing by."""

    serial: int
    chain: bytes
    num_cached: int


_Entry: TypeAlias = "tuple[bytes, int, _Filler]"
"""Serials are unique, so fillers are never compared."""


@dataclass(eq=False, slots=True)
class Waiter:
    """owner: of the call that waits. block_hash: the last block that it waits for.

    wake: called under the core's lock, any number of times.
    """

    owner: bytes
    block_hash: bytes
    wake: Callable[[], object]


class PendingBlocks:
    """digest_bytes: of all hashes."""

    def __init__(self, digest_bytes: int) -> None:
        self._digest_bytes = digest_bytes
        self._fillers: dict[int, _Filler] = {}
        self._sorted: list[_Entry] = []
        self._waiters: dict[bytes, set[Waiter]] = {}

    # ---- fillers

    @property
    def num_fillers(self) -> int:
        return len(self._fillers)

    def begin(self, sequence: Sequence, chain: bytes) -> None:
        """The sequence is to compute what is not cached of the blocks of `chain`.

        chain: digests of full blocks from its start on. Nothing happens if all are cached, or it
        registers none.
        """
        if sequence.serial in self._fillers:
            self.end(sequence)
        num_cached = sequence.num_cached_blocks
        if sequence.registers and num_cached * self._digest_bytes < len(chain):
            filler = _Filler(sequence.serial, chain, num_cached)
            self._fillers[sequence.serial] = filler
            insort(self._sorted, (chain, sequence.serial, filler))

    def advance(self, sequence: Sequence, start: int) -> None:
        """Blocks of the sequence are cached from `start` on, or it has ceased to register."""
        end = sequence.num_cached_blocks
        filler = self._fillers.get(sequence.serial)
        if filler is None:
            self._wake(sequence.hashes, start, end)
            return
        filler.num_cached = end
        num_blocks = len(filler.chain) // self._digest_bytes
        if not sequence.registers:
            self._drop(filler)
            self._wake(filler.chain, start, num_blocks)
            return
        if end >= num_blocks:
            self._drop(filler)
        # Decoding may have added blocks that the filler's chain does not have.
        self._wake(sequence.hashes, start, end)

    def cut(self, sequence: Sequence, num_blocks: int) -> None:
        """The sequence has only so many full blocks left."""
        filler = self._fillers.get(sequence.serial)
        if filler is not None:
            self.begin(sequence, filler.chain[: num_blocks * self._digest_bytes])

    def end(self, sequence: Sequence) -> None:
        """The sequence computes nothing more."""
        filler = self._fillers.get(sequence.serial)
        if filler is not None:
            self._drop(filler)
            self._wake(filler.chain, filler.num_cached, len(filler.chain) // self._digest_bytes)

    def clear(self) -> None:
        """No sequence of now will register a block any more."""
        self._fillers.clear()
        self._sorted.clear()
        self.wake_all()

    # ---- prompts

    def num_blocks(self, hashes: BlockHashes, num_hits: int, limit: int) -> int:
        """How many blocks of a prompt are pending after its hits.

        hashes: of its full blocks, of which the first `limit` count.
        """
        if not self._sorted or num_hits >= limit:
            return 0
        data, end = hashes.data, num_hits
        place = bisect_left(self._sorted, (data,))
        for _, _, filler in self._sorted[max(place - 1, 0) : place + 1]:
            end = self._num_equal(filler, data, end, limit)
        return end - num_hits

    # ---- waiters

    def wait(self, owner: bytes, block_hash: bytes, wake: Callable[[], object]) -> Waiter:
        """`wake` is called until `stop_waiting`, when the pending block is cached or given up."""
        waiter = Waiter(owner, block_hash, wake)
        self._waiters.setdefault(block_hash, set()).add(waiter)
        return waiter

    def stop_waiting(self, waiter: Waiter) -> None:
        waiters = self._waiters[waiter.block_hash]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[waiter.block_hash]

    @property
    def num_waiters(self) -> int:
        return sum(map(len, self._waiters.values()))

    def has_waiter_of(self, owner: bytes) -> bool:
        return any(w.owner == owner for waiters in self._waiters.values() for w in waiters)

    def wake_owner(self, owner: bytes) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                if waiter.owner == owner:
                    waiter.wake()

    def wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake()

    # ---- inside

    def _drop(self, filler: _Filler) -> None:
        del self._fillers[filler.serial]
        del self._sorted[bisect_left(self._sorted, (filler.chain, filler.serial))]

    def _num_equal(self, filler: _Filler, data: bytes, at_least: int, limit: int) -> int:
        """How many blocks, hits included, are the filler's too; at least `at_least`."""
        if filler.num_cached > at_least:
            # Only with digests that collide: what is cached of its chain was no hit.
            return at_least
        width, chain = self._digest_bytes, filler.chain
        equal, most = at_least, min(limit, len(chain) // width)
        while equal < most:
            middle = (equal + most + 1) // 2
            last = slice((middle - 1) * width, middle * width)
            if chain[last] == data[last]:
                equal = middle
            else:
                most = middle - 1
        return equal

    def _wake(self, chain: bytes | bytearray, start: int, end: int) -> None:
        """Wake those that wait for one of the blocks `start ..< end` of a chain."""
        if not self._waiters:
            return
        width = self._digest_bytes
        for at in range(start * width, end * width, width):
            for waiter in self._waiters.get(bytes(chain[at : at + width]), ()):
                waiter.wake()
