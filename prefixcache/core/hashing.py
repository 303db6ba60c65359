"""The hash chain: `hash(parent_hash, token_ids, extra_keys)` of every full block.

Owns the three recipes and NONE_HASH; extra keys come encoded from `extra_keys`. Holds no state
about cached blocks. All functions are pure, so they run outside the core's lock.

Recipes (`HASH_RECIPE_VERSION` 1); `sha256_cbor` and `xxhash_cbor` give the bytes of vLLM 0.33
(`vllm/utils/hashing.py`, `vllm/v1/core/kv_cache_utils.py`), checked by golden values:

    sha256_cbor  SHA-256   canonical CBOR of [parent, [token ids], extra keys or null]
    xxhash_cbor  XXH3-128  the same bytes
    xxh3         XXH3-128  parent ‖ token ids as u32 LE ‖ canonical CBOR of extra keys, if any

A chain is made by compiled code or in Python, as `form` says. A digest that is none of the three
(tests inject some) goes the Python way in both.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import cbor2
import numpy as np
import xxhash

from prefixcache.core.extra_keys import block_extra_keys
from prefixcache.core.form import FORM
from prefixcache.core.python.hash_chain import hash_cbor, hash_raw
from prefixcache.types import NO_EXTRA_KEYS, BlockHash, BlockIds, ExtraKeys, TokenIds

HASH_RECIPE_VERSION = 1

_native_hash_chain: Callable[..., bytes] | None = None
if FORM == "native":
    from prefixcache.core.native.hash_chain import hash_chain

    _native_hash_chain = hash_chain


class BlockHashes(Sequence[BlockHash]):
    """Hashes of consecutive blocks in one buffer, `digest_bytes` each. Immutable.

    A sequence of bytes objects to look at; the pool reads `data`.
    """

    __slots__ = ("data", "digest_bytes")

    def __init__(self, data: bytes, digest_bytes: int) -> None:
        self.data = data
        self.digest_bytes = digest_bytes

    def __len__(self) -> int:
        return len(self.data) // self.digest_bytes

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> BlockHashes: ...

    def __getitem__(self, index: int | slice) -> BlockHash | BlockHashes:
        width = self.digest_bytes
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            return BlockHashes(self.data[start * width : stop * width], width)
        start = range(len(self))[index] * width
        return BlockHash(self.data[start : start + width])

    def __iter__(self) -> Iterator[BlockHash]:
        data, width = self.data, self.digest_bytes
        return iter([BlockHash(data[at : at + width]) for at in range(0, len(data), width)])


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """One recipe. `digest` maps bytes to `digest_bytes` bytes."""

    name: str
    digest_bytes: int
    digest: Callable[[bytes], bytes]
    uses_cbor: bool
    is_cryptographic: bool

    @property
    def is_recipe(self) -> bool:
        """False for one that is none of `HASH_ALGORITHMS`, whatever its name."""
        return HASH_ALGORITHMS.get(self.name) is self


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASH_ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        HashAlgorithm("sha256_cbor", 32, _sha256, True, True),
        HashAlgorithm("xxhash_cbor", 16, xxhash.xxh3_128_digest, True, False),
        HashAlgorithm("xxh3", 16, xxhash.xxh3_128_digest, False, False),
    )
}


def none_hash(algorithm: HashAlgorithm, seed: str | None) -> BlockHash:
    """The parent of every first block.

    Without a seed it is OS randomness, so no one can build collisions or guess hashes, and two
    daemons never agree. With a seed it is the digest of the seed's canonical CBOR (a text), which
    is vLLM's value under `PYTHONHASHSEED=<seed>`.
    """
    if seed is None:
        return BlockHash(secrets.token_bytes(algorithm.digest_bytes))
    return BlockHash(algorithm.digest(cbor2.dumps(seed, canonical=True)))


def hash_blocks(
    algorithm: HashAlgorithm,
    parent: bytes,
    token_ids: TokenIds,
    extra_keys: Sequence[bytes] | None,
    block_size: int,
    *,
    in_background: bool = False,
) -> BlockHashes:
    """Hashes of the full blocks of `token_ids`, chained from `parent`.

    token_ids: `[n] uint32`, n a multiple of block_size (the start of the chain is `parent`).
    extra_keys: one encoded value a block as `block_extra_keys` gives it, or None. in_background:
    the compiled form hashes a long prompt in a thread of lower priority.
    """
    if _native_hash_chain is not None and algorithm.is_recipe:
        data = _native_hash_chain(
            algorithm.name,
            parent,
            np.ascontiguousarray(token_ids),
            extra_keys,
            block_size,
            in_background,
        )
    else:
        chain = hash_cbor if algorithm.uses_cbor else hash_raw
        data = chain(algorithm.digest, parent, token_ids, extra_keys, block_size)
    return BlockHashes(data, algorithm.digest_bytes)


class Chain(NamedTuple):
    """Consecutive full blocks of one token sequence, by content.

    A named tuple, which is made faster than a frozen dataclass: each Lookup makes one.

    hashes: one a block. token_ids: `[len(hashes) * B] uint32`. extra_keys: encoded, one a block
    (`b""` for none), or None for none in any. guess: blocks that the first hashes were registered
    for a moment ago, see `Pool.guess`; None for no guess.
    """

    hashes: BlockHashes
    token_ids: TokenIds
    extra_keys: Sequence[bytes] | None
    guess: BlockIds | None = None


class Hasher:
    """The recipe of one daemon: algorithm, NONE_HASH and block size. Immutable.

    in_background: as for `hash_blocks`.
    """

    def __init__(
        self,
        algorithm: HashAlgorithm,
        seed: str | None,
        block_size: int,
        *,
        in_background: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.block_size = block_size
        self.none_hash = none_hash(algorithm, seed)
        self.is_seeded = seed is not None
        self._in_background = in_background

    def chain(
        self,
        parent: BlockHash | None,
        token_ids: TokenIds,
        extra_keys: ExtraKeys,
        first_block: int = 0,
    ) -> Chain:
        """Hash the full blocks of `token_ids`, which start at block `first_block`.

        parent: the hash of the block before, None for the start of a sequence. token_ids:
        `[m] uint32`; those past the last full block are not looked at.
        """
        size = self.block_size
        num_blocks, num_left = divmod(len(token_ids), size)
        content = token_ids[:-num_left] if num_left else token_ids
        keys = None
        if extra_keys is not NO_EXTRA_KEYS:
            keys = block_extra_keys(extra_keys, first_block, num_blocks, size)
        start = self.none_hash if parent is None else parent
        hashes = hash_blocks(
            self.algorithm, start, content, keys, size, in_background=self._in_background
        )
        return Chain(hashes, content, keys)
