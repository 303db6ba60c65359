"""A mirror of the cache, made of its events alone: what a router would hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prefixcache.core.events import Change, Cleared, Removed, Stored
from prefixcache.core.pool import REGISTERED, Pool
from prefixcache.core.snapshot import CachedBlocks


class Mirror:
    """`parent_of` each block that is cached; None for the first of a sequence.

    Strict: asserts that a parent comes before its children and goes after them, that nothing is
    stored twice, and that what is removed was there.
    """

    def __init__(self) -> None:
        self.parent_of: dict[bytes, bytes | None] = {}
        self._num_children: Counter[bytes] = Counter()

    def store(self, block_hashes: Iterable[bytes], parent: bytes | None) -> None:
        for block_hash in block_hashes:
            assert block_hash not in self.parent_of
            if parent is not None:
                assert parent in self.parent_of, "a child came before its parent"
                self._num_children[parent] += 1
            self.parent_of[block_hash] = parent
            parent = block_hash

    def remove(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            parent = self.parent_of.pop(block_hash)
            assert not self._num_children.pop(block_hash, 0), "a parent went before its child"
            if parent is not None:
                self._num_children[parent] -= 1

    def clear(self) -> None:
        self.parent_of.clear()
        self._num_children.clear()

    def apply(self, change: Change, digest_bytes: int) -> None:
        """A change of the core."""
        match change:
            case Stored(hashes, parent):
                self.store(split(hashes, digest_bytes), parent)
            case Removed(hashes):
                self.remove(split(hashes, digest_bytes))
            case Cleared():
                self.clear()


def split(hashes: bytes, digest_bytes: int) -> list[bytes]:
    assert len(hashes) % digest_bytes == 0
    return [hashes[at : at + digest_bytes] for at in range(0, len(hashes), digest_bytes)]


def snapshot_of(pool: Pool) -> Mirror:
    """A mirror of what the pool holds now."""
    room = CachedBlocks.room_for(pool.num_blocks, pool.digest_bytes)
    mirror = Mirror()
    for run in room.head(pool.copy_cached(room)).runs(max_event_bytes=4096):
        mirror.apply(run, pool.digest_bytes)
    return mirror


def index_of(pool: Pool) -> set[bytes]:
    """Hashes of the findable blocks, read block by block."""
    blocks = range(pool.num_blocks)
    found = [pool.hash_of(block) for block in blocks if pool.state_of(block) == REGISTERED]
    return {block_hash for block_hash in found if block_hash is not None}
