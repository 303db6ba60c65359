"""The hash chain: `hash(parent_hash, token_ids, extra_keys)` of every full block.

Owns the three recipes and NONE_HASH; extra keys come encoded from `extra_keys`. Holds no state
about cached blocks. All functions are pure, so they run outside the core's lock.

Recipes (`HASH_RECIPE_VERSION` 1); `sha256_cbor` and `xxhash_cbor` give the bytes of vLLM 0.33
(`vllm/utils/hashing.py`, `vllm/v1/core/kv_cache_utils.py`), checked by golden values:

    sha256_cbor  SHA-256   canonical CBOR of [parent, [token ids], extra keys or null]
    xxhash_cbor  XXH3-128  the same bytes
    xxh3         XXH3-128  parent ‖ token ids as u32 LE ‖ canonical CBOR of extra keys, if any

The token ids of a whole prompt are encoded to CBOR at once: each token's bytes are laid out
right-aligned in a row of five, and one boolean selection drops the unused ones. Calling an
encoder per block costs several times the hashing itself.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cbor2
import numpy as np
import numpy.typing as npt
import xxhash

from prefixcache.core.extra_keys import block_extra_keys
from prefixcache.types import BlockHash, ExtraKeys, TokenIds

HASH_RECIPE_VERSION = 1

_CBOR_NULL = b"\xf6"
_CBOR_MAX_TOKEN_BYTES = 5
_TOKENS_A_CHUNK = 1 << 15
"""Tokens encoded at a time: the five-fold scratch rows of a chunk stay in the cache."""


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """One recipe. `digest` maps bytes to `digest_bytes` bytes."""

    name: str
    digest_bytes: int
    digest: Callable[[bytes], bytes]
    uses_cbor: bool
    is_cryptographic: bool


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
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, chained from `parent`.

    token_ids: `[n] uint32`, n a multiple of block_size (the start of the chain is `parent`).
    extra_keys: one encoded value a block as `block_extra_keys` gives it, or None.
    """
    if algorithm.uses_cbor:
        return _hash_cbor(algorithm, parent, token_ids, extra_keys, block_size)
    return _hash_raw(algorithm, parent, token_ids, extra_keys, block_size)


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive full blocks of one token sequence, by content.

    hashes: one a block. token_ids: `[len(hashes) * B] uint32`. extra_keys: encoded, one a block
    (`b""` for none), or None for none in any.
    """

    hashes: Sequence[BlockHash]
    token_ids: TokenIds
    extra_keys: Sequence[bytes] | None


class Hasher:
    """The recipe of one daemon: algorithm, NONE_HASH and block size. Immutable."""

    def __init__(self, algorithm: HashAlgorithm, seed: str | None, block_size: int) -> None:
        self.algorithm = algorithm
        self.block_size = block_size
        self.none_hash = none_hash(algorithm, seed)
        self.is_seeded = seed is not None

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
        num_blocks = len(token_ids) // size
        content = token_ids[: num_blocks * size]
        keys = block_extra_keys(extra_keys, first_block, num_blocks, size)
        start = self.none_hash if parent is None else parent
        return Chain(hash_blocks(self.algorithm, start, content, keys, size), content, keys)


def _hash_raw(
    algorithm: HashAlgorithm,
    parent: bytes,
    token_ids: TokenIds,
    extra_keys: Sequence[bytes] | None,
    block_size: int,
) -> list[BlockHash]:
    data = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    width = block_size * 4
    digest = algorithm.digest
    hashes: list[BlockHash] = []
    for index, start in enumerate(range(0, len(data), width)):
        message = parent + data[start : start + width]
        if extra_keys is not None:
            message += extra_keys[index]
        parent = digest(message)
        hashes.append(BlockHash(parent))
    return hashes


def _hash_cbor(
    algorithm: HashAlgorithm,
    parent: bytes,
    token_ids: TokenIds,
    extra_keys: Sequence[bytes] | None,
    block_size: int,
) -> list[BlockHash]:
    # A list of three, then the head of a byte string of the parent's length.
    head = b"\x83" + _cbor_head(2, algorithm.digest_bytes)
    array_head = _cbor_head(4, block_size)
    digest = algorithm.digest
    hashes: list[BlockHash] = []
    chunk = max(1, _TOKENS_A_CHUNK // block_size) * block_size
    for chunk_start in range(0, len(token_ids), chunk):
        body, ends = _encode_tokens(token_ids[chunk_start : chunk_start + chunk], block_size)
        start = 0
        for end in ends:
            tail = (extra_keys[len(hashes)] if extra_keys is not None else b"") or _CBOR_NULL
            parent = digest(b"".join((head, parent, array_head, body[start:end], tail)))
            hashes.append(BlockHash(parent))
            start = end
    return hashes


def _encode_tokens(token_ids: TokenIds, block_size: int) -> tuple[bytes, list[int]]:
    """CBOR unsigned integers of all tokens in a row, and where each block's bytes end."""
    num_tokens = len(token_ids)
    rows = np.empty((num_tokens, _CBOR_MAX_TOKEN_BYTES), dtype=np.uint8)
    rows[:, 1:] = token_ids.astype(">u4").view(np.uint8).reshape(num_tokens, 4)
    rows[:, 0] = 0x1A
    one, two, four = token_ids > 23, token_ids > 0xFF, token_ids > 0xFFFF
    middle, low = rows[:, 2], rows[:, 3]
    middle[~four] = 0x19
    low[~two] = 0x18
    used = np.empty((num_tokens, _CBOR_MAX_TOKEN_BYTES), dtype=np.bool_)
    used[:, 0] = used[:, 1] = four
    used[:, 2] = two
    used[:, 3] = one
    used[:, 4] = True
    widths: npt.NDArray[np.int64] = used.reshape(-1, block_size * _CBOR_MAX_TOKEN_BYTES).sum(axis=1)
    return rows[used].tobytes(), np.cumsum(widths).tolist()


def _cbor_head(major_type: int, length: int) -> bytes:
    encoded: bytes = cbor2.dumps(length, canonical=True)
    return bytes([encoded[0] | major_type << 5]) + encoded[1:]
