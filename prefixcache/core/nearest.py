"""The cached block that is most like one that is not: what a prompt's next block differs in.

Both follow the same cached block, or both begin a sequence of one namespace. Where hits are
verified the pool has the tokens and keys of all cached blocks, and they are compared. Elsewhere it
has hashes only. Then the same tokens are tried under other keys that were used lately, which finds
out what key differs; and what differs in tokens is known as long as the sequence that has the
cached block is alive. Looks and changes nothing; guarded by the core's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import cbor2
import numpy as np
import numpy.typing as npt

from prefixcache.core.extra_keys import block_extra_keys
from prefixcache.core.hashing import Hasher
from prefixcache.core.live import LiveSequences
from prefixcache.core.pool import Pool
from prefixcache.core.recent_keys import RecentKeys
from prefixcache.core.sequence import Prompt
from prefixcache.types import BlockHash, BlockIds, ExtraKeys, TokenIds

MAX_CHILDREN = 2**16
"""Cached blocks after the same one of which the tokens are compared."""
MAX_SEQUENCES = 4096
"""Live sequences that are looked at, the newest ones."""


class NearBlock(NamedTuple):
    """num_equal: leading tokens that are the same. extra_keys: as they are encoded in its hash."""

    num_equal: int
    extra_keys: bytes


@dataclass(frozen=True, slots=True)
class MissedBlock:
    """Block `index` of a prompt, which follows its hits."""

    index: int
    parent: int | None
    parent_hash: BlockHash | None
    token_ids: TokenIds
    extra_keys: ExtraKeys

    @classmethod
    def of(cls, prompt: Prompt, hits: BlockIds, size: int) -> MissedBlock:
        """The block after the hits. It is full."""
        assert prompt.chain is not None
        index = len(hits)
        return cls(
            index,
            int(hits[-1]) if index else None,
            prompt.chain.hashes[index - 1] if index else None,
            prompt.token_ids[index * size : (index + 1) * size],
            prompt.extra_keys,
        )

    def encoded_keys(self) -> bytes:
        return _encoded_keys(self.extra_keys, self.index, len(self.token_ids))


class NearestBlocks:
    """recent_keys: which are tried where the pool keeps no content."""

    def __init__(
        self, pool: Pool, live: LiveSequences, hasher: Hasher, recent_keys: RecentKeys
    ) -> None:
        self._pool = pool
        self._live = live
        self._hasher = hasher
        self._recent_keys = recent_keys

    def find(self, missed: MissedBlock) -> NearBlock | None:
        """The one with the most leading tokens in common, and of those one with the same keys.

        None if there is none; among the first blocks of sequences, if none begins as this one does.
        """
        if self._pool.keeps_content:
            found = self._in_store(missed)
        else:
            found = self._under_other_keys(missed) or self._in_live_sequences(missed)
        if found is None or (not missed.index and not found.num_equal):
            return None
        return found

    def _in_store(self, missed: MissedBlock) -> NearBlock | None:
        blocks = self._pool.children_of(missed.parent, MAX_CHILDREN)
        if not len(blocks):
            return None
        num_equal = _num_equal(self._pool.tokens_of(blocks), missed.token_ids)
        own_keys = missed.encoded_keys()
        best: NearBlock | None = None
        for at in np.argsort(-num_equal, kind="stable").tolist():
            near = NearBlock(int(num_equal[at]), self._pool.keys_of(int(blocks[at])))
            if best is not None and near.num_equal < best.num_equal:
                break
            if missed.parent is None and _tenant(near.extra_keys) != _tenant(own_keys):
                continue
            if best is None or near.extra_keys == own_keys:
                best = near
        return best

    def _under_other_keys(self, missed: MissedBlock) -> NearBlock | None:
        index, size = missed.index, len(missed.token_ids)
        start = index * size
        for keys in self._recent_keys.alternatives(missed.extra_keys, start, start + size):
            chain = self._hasher.chain(missed.parent_hash, missed.token_ids, keys, index)
            if self._pool.block_of(chain.hashes[0]) is not None:
                return NearBlock(size, _encoded_keys(keys, index, size))
        return None

    def _in_live_sequences(self, missed: MissedBlock) -> NearBlock | None:
        own_keys = missed.encoded_keys()
        best: NearBlock | None = None
        for near in self._live_blocks(missed):
            if best is None or _rank(near, own_keys) > _rank(best, own_keys):
                best = near
        return best

    def _live_blocks(self, missed: MissedBlock) -> Iterator[NearBlock]:
        """Cached blocks of live sequences, in the place of the missed one."""
        index, size = missed.index, len(missed.token_ids)
        width = self._pool.digest_bytes
        tenant = _tenant(missed.encoded_keys())
        for sequence in islice(reversed(self._live.by_id.values()), MAX_SEQUENCES):
            if sequence.num_cached_blocks <= index:
                continue
            before = bytes(sequence.hashes[(index - 1) * width : index * width])
            if index and before != missed.parent_hash:
                continue
            keys = _encoded_keys(sequence.extra_keys, index, size)
            if index or _tenant(keys) == tenant:
                tokens = sequence.tokens(index * size, (index + 1) * size)
                yield NearBlock(int(_num_equal(tokens[None], missed.token_ids)[0]), keys)


def _rank(near: NearBlock, own_keys: bytes) -> tuple[int, bool]:
    return near.num_equal, near.extra_keys == own_keys


def _num_equal(rows: npt.NDArray[np.uint32], token_ids: TokenIds) -> npt.NDArray[np.int64]:
    """How many leading tokens of each row, `[n, B]`, are these, `[B]`."""
    equal: npt.NDArray[np.int64] = np.logical_and.accumulate(rows == token_ids, axis=1).sum(axis=1)
    return equal


def _encoded_keys(extra_keys: ExtraKeys, index: int, size: int) -> bytes:
    keys = block_extra_keys(extra_keys, index, 1, size)
    return keys[0] if keys else b""


def _tenant(encoded_keys: bytes) -> Any:
    """The tenant's key of a first block, which is the first of its keys; None for none."""
    first = cbor2.loads(encoded_keys)[0] if encoded_keys else [None]
    return first if first[0] == "tenant" else None
