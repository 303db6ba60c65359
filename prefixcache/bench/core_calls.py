"""The calls of the block manager that `bench core` times, and what they are timed on.

One pool for each recipe and size. In each round it serves a prompt that is cached whole and a new
one of each length (small pools evict for it), and a batch of sequences that decode. The floor of
hashing is one digest over all the bytes that the chain of the prompt hashes, which leaves out that
each block waits for the one before.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial

import cbor2
import numpy as np

from prefixcache.bench.block_manager import make_block_manager
from prefixcache.bench.measure import Laps
from prefixcache.bench.prompts import Prompts
from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.hashing import HASH_ALGORITHMS, HashAlgorithm
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.types import NO_EXTRA_KEYS, FullHit, ResultCode, TokenIds

BATCH = 64
"""Sequences of the batch that decodes."""
BATCH_PROMPT = 256
"""Tokens that they begin with, or a few less."""
BATCH_STEPS = 16
"""Tokens that each of them appends in a round."""
FLOOR = "one digest"
MAKE_POOL = "make a pool"
HASH_LOOKUP = "hash + lookup"
ALLOCATE_COMMIT = "allocate + commit, new"
APPEND_COMMIT = "append + commit, 1 token a row"
_ONE_TOKEN = np.array([7], dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Key:
    """One measured call; None and empty where it plays no part."""

    call: str
    algorithm: str = ""
    blocks: int | None = None
    tokens: int | None = None
    rows: int | None = None

    @property
    def labels(self) -> dict[str, str | int]:
        return {
            name: value
            for name in ("algorithm", "blocks", "tokens", "rows")
            if (value := getattr(self, name))
        }


@dataclass(slots=True)
class Grower:
    """A sequence that decodes."""

    sequence_id: int
    num_tokens: int


class CacheUnderTest:
    """One pool with one recipe, and a round of calls on it. lengths: tokens of the prompts."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        algorithm: str,
        lengths: tuple[int, ...],
        laps: Laps[Key],
    ) -> None:
        self._sequences = make_block_manager(num_blocks, block_size, algorithm)
        self._num_blocks, self._algorithm, self._laps = num_blocks, algorithm, laps
        self._owner = secrets.token_bytes(16)
        self._prompts = {tokens: Prompts(tokens, seed=tokens) for tokens in lengths}
        self._cached = {tokens: found.next() for tokens, found in self._prompts.items()}
        for token_ids in self._cached.values():
            self._compute(token_ids)
        self._batch_prompts = Prompts(BATCH_PROMPT)

    def round(self) -> None:
        for tokens, prompts in self._prompts.items():
            self._cached_prompt(tokens)
            self._new_prompt(tokens, prompts.next())
        self._decode()

    def _cached_prompt(self, tokens: int) -> None:
        sequences, token_ids = self._sequences, self._cached[tokens]
        hash_key = Key("hash", self._algorithm, tokens=tokens)
        lookup_key = self._key("lookup", tokens)
        prompt = self._laps.time(hash_key, lambda: sequences.prepare(token_ids, NO_EXTRA_KEYS))
        found = self._laps.time(lookup_key, lambda: sequences.lookup(prompt, 0, FullHit.LAST_TOKEN))
        assert found.num_cached_blocks == tokens // sequences.pool.block_size
        self._laps.add_sum(self._key(HASH_LOOKUP, tokens), hash_key, lookup_key)
        reply = self._laps.time(
            self._key("allocate, cached", tokens),
            lambda: sequences.allocate(self._owner, "", prompt),
        )
        self._free(tokens, [reply.sequence_id])

    def _new_prompt(self, tokens: int, token_ids: TokenIds) -> None:
        sequences = self._sequences
        prompt = sequences.prepare(token_ids, NO_EXTRA_KEYS)
        allocate_key, commit_key = self._key("allocate, new", tokens), self._key("commit", tokens)
        reply = self._laps.time(allocate_key, lambda: sequences.allocate(self._owner, "", prompt))
        row = CommitRow(reply.sequence_id, 0, tokens)
        self._laps.time(commit_key, lambda: sequences.rows.commit(self._owner, [row]))
        self._laps.add_sum(self._key(ALLOCATE_COMMIT, tokens), allocate_key, commit_key)
        self._free(tokens, [reply.sequence_id])

    def _decode(self) -> None:
        # Of different lengths, so that in each step some of them begin a block.
        size = self._sequences.pool.block_size
        prompts = [self._batch_prompts.next()[: BATCH_PROMPT - row % size] for row in range(BATCH)]
        batch = [Grower(self._compute(prompt, keep=True), len(prompt)) for prompt in prompts]
        for _ in range(BATCH_STEPS):
            self._step(batch)
            self._step(batch[:1])
        self._sequences.free(self._owner, [grower.sequence_id for grower in batch])

    def _step(self, batch: list[Grower]) -> None:
        """Append a token to each, and commit it."""
        sequences, owner, count = self._sequences, self._owner, len(batch)
        rows = AppendBatch.of(
            [AppendRow(one.sequence_id, one.num_tokens, _ONE_TOKEN) for one in batch]
        )
        commits = [CommitRow(one.sequence_id, one.num_tokens, 1) for one in batch]
        append_key = self._key("append, 1 token a row", rows=count)
        commit_key = self._key("commit, 1 token a row", rows=count)
        appended = self._laps.time(append_key, lambda: sequences.rows.append(owner, rows))
        assert set(appended.result_codes) == {ResultCode.OK}
        self._laps.time(commit_key, lambda: sequences.rows.commit(owner, commits))
        self._laps.add_sum(self._key(APPEND_COMMIT, rows=count), append_key, commit_key)
        for one in batch:
            one.num_tokens += 1

    def _compute(self, token_ids: TokenIds, *, keep: bool = False) -> int:
        """Allocate and commit; the sequence's id."""
        sequences = self._sequences
        reply = sequences.allocate(self._owner, "", sequences.prepare(token_ids, NO_EXTRA_KEYS))
        first = reply.num_cached_tokens
        sequences.rows.commit(
            self._owner, [CommitRow(reply.sequence_id, first, len(token_ids) - first)]
        )
        if not keep:
            sequences.free(self._owner, [reply.sequence_id])
        return reply.sequence_id

    def _free(self, tokens: int, sequence_ids: list[int]) -> None:
        self._laps.time(
            self._key("free", tokens), lambda: self._sequences.free(self._owner, sequence_ids)
        )

    def _key(self, call: str, tokens: int | None = None, rows: int | None = None) -> Key:
        return Key(call, self._algorithm, self._num_blocks, tokens, rows)


class DigestFloor:
    """One digest over all the bytes that the chain of a prompt hashes."""

    def __init__(
        self, block_size: int, algorithm: str, lengths: tuple[int, ...], laps: Laps[Key]
    ) -> None:
        self._recipe, self._laps = HASH_ALGORITHMS[algorithm], laps
        self._bytes = {
            tokens: chain_bytes(self._recipe, Prompts(tokens).next(), block_size)
            for tokens in lengths
        }

    def round(self) -> None:
        for tokens, data in self._bytes.items():
            key = Key(FLOOR, self._recipe.name, tokens=tokens)
            self._laps.time(key, partial(self._recipe.digest, data))


def chain_bytes(recipe: HashAlgorithm, token_ids: TokenIds, block_size: int) -> bytes:
    """What the digest of a recipe is given for the full blocks of a prompt, one after the other."""
    parent = bytes(recipe.digest_bytes)
    end = len(token_ids) // block_size * block_size
    blocks = token_ids[:end].reshape(-1, block_size)
    if not recipe.uses_cbor:
        return b"".join(parent + block.astype("<u4").tobytes() for block in blocks)
    return b"".join(
        cbor2.dumps([parent, tokens, None], canonical=True) for tokens in blocks.tolist()
    )


class PoolMaker:
    """Making an empty pool."""

    def __init__(self, num_blocks: int, block_size: int, laps: Laps[Key]) -> None:
        self._num_blocks, self._block_size, self._laps = num_blocks, block_size, laps

    def round(self) -> None:
        self._laps.time(
            Key(MAKE_POOL, blocks=self._num_blocks),
            lambda: Pool(self._num_blocks, self._block_size, False),
        )
