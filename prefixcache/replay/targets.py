"""The caches that a replay can drive: a pool in this process, or a daemon.

A target serves one request at a time: allocate, commit, free. It owns the request that runs and
nothing else; counting is the loop's business. Not thread-safe.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prefixcache.core.hashing import HASH_ALGORITHMS, Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import CommitRow
from prefixcache.core.sequences import Sequences
from prefixcache.errors import ExceedsPoolError, FailedPreconditionError
from prefixcache.types import NO_EXTRA_KEYS, FullHit, LookupResult, TokenIds

if TYPE_CHECKING:
    from prefixcache.client import Client, Sequence


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of one request.

    num_hit_blocks: full blocks of the prompt that are cached. num_cached_tokens: tokens whose K/V
    need not be computed, one less than the prompt has when all of it is cached. A request that
    needs more blocks than the pool has is not admitted: it has changed nothing.
    """

    is_admitted: bool
    num_hit_blocks: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TargetStats:
    """num_evictions: since the target's start. num_cached_blocks: findable now."""

    num_evictions: int
    num_cached_blocks: int


class Target(Protocol):
    """A cache that answers one request at a time."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    def allocate(self, token_ids: TokenIds) -> Admission:
        """Look a prompt (`[n] uint32`, n >= 1) up and, unless it exceeds the pool, start it.

        The request before must be freed. Raises PrefixCacheError when the target fails, or is
        changed by somebody else meanwhile.
        """

    def commit(self) -> None:
        """The running request has the K/V of all its tokens."""

    def free(self) -> None:
        """End the running request."""

    def stats(self) -> TargetStats:
        """Counts of now."""


class InProcessTarget:
    """A pool of its own, empty at first, and no K/V. A prompt is hashed once.

    hash_algorithm: a name in `HASH_ALGORITHMS`. verify_hits: compare contents on every hit; by
    default only with digests that are not cryptographic, as the daemon does.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hash_algorithm: str = "sha256_cbor",
        verify_hits: bool | None = None,
    ) -> None:
        algorithm = HASH_ALGORITHMS[hash_algorithm]
        if verify_hits is None:
            verify_hits = not algorithm.is_cryptographic
        self._pool = Pool(num_blocks, block_size, verify_hits, algorithm.digest_bytes)
        self._sequences = Sequences(self._pool, Hasher(algorithm, None, block_size))
        self._owner = secrets.token_bytes(16)
        self._commit_row = CommitRow(0, 0, 0)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def allocate(self, token_ids: TokenIds) -> Admission:
        prompt = self._sequences.prepare(token_ids, NO_EXTRA_KEYS)
        found = self._sequences.lookup(prompt, 0, FullHit.LAST_TOKEN)
        try:
            reply = self._sequences.allocate(self._owner, "", prompt)
        except ExceedsPoolError:
            return _refusal(found)
        num_cached = reply.num_cached_tokens
        num_computed = len(token_ids) - num_cached
        self._commit_row = CommitRow(reply.sequence_id, num_cached, num_computed)
        return Admission(True, found.num_cached_blocks, num_cached)

    def commit(self) -> None:
        self._sequences.rows.commit(self._owner, [self._commit_row])

    def free(self) -> None:
        self._sequences.free(self._owner, [self._commit_row.sequence_id])

    def stats(self) -> TargetStats:
        return TargetStats(self._pool.num_evictions, self._pool.num_cached)


class DaemonTarget:
    """A daemon without K/V memory (`--storage none`), through a client that stays the caller's.

    Counts are those of the trace only if the cache is empty at the start and nobody else uses it.
    Raises FailedPreconditionError if blocks are cached or referenced.
    """

    def __init__(self, client: Client) -> None:
        info, stats = client.server_info(), client.stats()
        if stats.referenced or stats.cached:
            raise FailedPreconditionError(
                f"the daemon's pool is in use: {stats.referenced} blocks referenced, "
                f"{stats.cached} cached; a replay needs an empty one "
                "(--reset drops what is cached)",
                {"referenced": stats.referenced, "cached": stats.cached},
            )
        self._client = client
        self._num_blocks = info.num_blocks
        self._block_size = info.block_size
        self._running: Sequence | None = None

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    def allocate(self, token_ids: TokenIds) -> Admission:
        found = self._client.lookup(token_ids)
        try:
            self._running = self._client.sequence(token_ids)
        except ExceedsPoolError:
            return _refusal(found)
        num_cached = self._running.num_cached_tokens
        if num_cached != found.num_cached_tokens:
            raise FailedPreconditionError(
                f"Lookup found {found.num_cached_tokens} tokens and Allocate {num_cached}: "
                "somebody else uses this daemon"
            )
        return Admission(True, found.num_cached_blocks, num_cached)

    def commit(self) -> None:
        assert self._running is not None
        self._running.commit(self._running.num_tokens - self._running.num_cached_tokens)

    def free(self) -> None:
        assert self._running is not None
        self._running.free()
        self._running = None

    def stats(self) -> TargetStats:
        stats = self._client.stats()
        return TargetStats(stats.evictions, stats.cached)


def _refusal(found: LookupResult) -> Admission:
    return Admission(False, found.num_cached_blocks, found.num_cached_tokens)
