"""The hash chain in Python and numpy, for any digest.

The token ids of a whole prompt are encoded to CBOR at once: each token's bytes are laid out
right-aligned in a row of five, and one boolean selection drops the unused ones. Calling an
encoder per block costs several times the hashing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cbor2
import numpy as np
import numpy.typing as npt

from prefixcache.types import TokenIds

_CBOR_NULL = b"\xf6"
_CBOR_MAX_TOKEN_BYTES = 5
_TOKENS_A_CHUNK = 1 << 15
"""Tokens encoded at a time: the five-fold scratch rows of a chunk stay in the cache."""

Digest = Callable[[bytes], bytes]


def hash_raw(
    digest: Digest,
    parent: bytes,
    token_ids: TokenIds,
    extra_keys: Sequence[bytes] | None,
    block_size: int,
) -> bytes:
    """Digests, one after another, of `parent ‖ token ids as u32 LE ‖ extra keys`, chained."""
    data = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    width = block_size * 4
    hashes: list[bytes] = []
    for index, start in enumerate(range(0, len(data), width)):
        message = parent + data[start : start + width]
        if extra_keys is not None:
            message += extra_keys[index]
        parent = digest(message)
        hashes.append(parent)
    return b"".join(hashes)


def hash_cbor(
    digest: Digest,
    parent: bytes,
    token_ids: TokenIds,
    extra_keys: Sequence[bytes] | None,
    block_size: int,
) -> bytes:
    """The same of canonical CBOR of `[parent, [token ids], extra keys or null]`."""
    # A list of three, then the head of a byte string of the parent's length.
    head = b"\x83" + _cbor_head(2, len(parent))
    array_head = _cbor_head(4, block_size)
    hashes: list[bytes] = []
    chunk = max(1, _TOKENS_A_CHUNK // block_size) * block_size
    for chunk_start in range(0, len(token_ids), chunk):
        body, ends = _encode_tokens(token_ids[chunk_start : chunk_start + chunk], block_size)
        start = 0
        for end in ends:
            tail = (extra_keys[len(hashes)] if extra_keys is not None else b"") or _CBOR_NULL
            parent = digest(b"".join((head, parent, array_head, body[start:end], tail)))
            hashes.append(parent)
            start = end
    return b"".join(hashes)


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
