"""The cached block that is most like one that is not: what a prompt's next block differs in.

Both follow the same cached block, or both begin a sequence of one namespace. Where hits are
verified the pool has the tokens and keys of all cached blocks, and they are compared. Elsewhere it
has hashes only. Then the same tokens are tried under other keys that were used lately, which finds
out what key differs; and what differs in tokens is known as long as the sequence that has the
cached block is alive. Looks and changes nothing; guarded by the core's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
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
from prefixcache.core.sequence import Prompt, Sequence
from prefixcache.types import BlockHash, BlockIds, ExtraKeys, TokenIds

MAX_CHILDREN = 2**14
"""Cached blocks after the same one of which the tokens are compared: some ms under the lock."""
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
        rows = self._pool.tokens_of(blocks)
        return _nearest(missed, rows, lambda row: self._pool.keys_of(int(blocks[row])))

    def _under_other_keys(self, missed: MissedBlock) -> NearBlock | None:
        index, size = missed.index, len(missed.token_ids)
        start = index * size
        for keys in self._recent_keys.alternatives(missed.extra_keys, start, start + size):
            chain = self._hasher.chain(missed.parent_hash, missed.token_ids, keys, index)
            if self._pool.block_of(chain.hashes[0]) is not None:
                return NearBlock(size, _encoded_keys(keys, index, size))
        return None

    def _in_live_sequences(self, missed: MissedBlock) -> NearBlock | None:
        index, size = missed.index, len(missed.token_ids)
        found = [sequence for sequence in self._newest() if self._is_like(sequence, missed)]
        tokens = [sequence.token_ids[index * size : (index + 1) * size] for sequence in found]
        rows = np.frombuffer(b"".join(tokens), dtype=np.uint32).reshape(-1, size)
        return _nearest(missed, rows, lambda row: _encoded_keys(found[row].extra_keys, index, size))

    def _newest(self) -> Iterator[Sequence]:
        return islice(reversed(self._live.by_id.values()), MAX_SEQUENCES)

    def _is_like(self, sequence: Sequence, missed: MissedBlock) -> bool:
        """Whether it has a cached block in the missed one's place, after the same block."""
        if sequence.num_cached_blocks <= missed.index:
            return False
        width = self._pool.digest_bytes
        before = sequence.hashes[(missed.index - 1) * width : missed.index * width]
        return not missed.index or bytes(before) == missed.parent_hash


def _nearest(
    missed: MissedBlock, rows: npt.NDArray[np.uint32], keys_of: Callable[[int], bytes]
) -> NearBlock | None:
    """Of blocks with these tokens, `[n, B]`, that follow the same block as the missed one.

    keys_of: the encoded extra keys of a row. First blocks of another tenant are passed over.
    """
    num_equal = _num_equal(rows, missed.token_ids)
    own_keys = missed.encoded_keys()
    own_tenant, tenant_of = _tenant(own_keys), cache(_tenant)
    best: NearBlock | None = None
    order = np.argsort(-num_equal, kind="stable")
    for row, equal in zip(order.tolist(), num_equal[order].tolist(), strict=True):
        if best is not None and equal < best.num_equal:
            break
        keys = keys_of(row)
        if missed.index == 0 and tenant_of(keys) != own_tenant:
            continue
        if keys == own_keys:
            return NearBlock(equal, keys)
        best = best or NearBlock(equal, keys)
    return best


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
