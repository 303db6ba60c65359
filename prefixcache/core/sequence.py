"""The record of one live sequence, and the requests of the calls on it.

A `Sequence` is changed only by modules of the core, under its lock. Its record is the compiled one
or the one in Python, as `form` says.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prefixcache.core.form import FORM
from prefixcache.core.hashing import Chain
from prefixcache.types import NO_EXTRA_KEYS, BlockIds, ExtraKeys, TokenIds

if TYPE_CHECKING or FORM == "python":
    from prefixcache.core.python.sequence_record import SequenceRecord
else:
    from prefixcache.core.native.sequence_record import SequenceRecord

_INT32 = np.dtype(np.int32)


class Prompt(NamedTuple):
    """Tokens of a request and the chain of their full blocks (None with caching off).

    A named tuple, as what is a row below: each Lookup and each Allocate makes one.
    """

    token_ids: TokenIds
    extra_keys: ExtraKeys
    chain: Chain | None


class AppendRow(NamedTuple):
    """One sequence's part of Append. `token_ids`: `[m] uint32`, m >= 0.

    No frozen dataclass as other values are: those take four times as long to make, and a batch has
    one a sequence.
    """

    sequence_id: int
    start_position: int
    token_ids: TokenIds
    num_kv_valid: int = 0
    num_lookahead_tokens: int = 0
    extra_keys: ExtraKeys = NO_EXTRA_KEYS


class CommitRow(NamedTuple):
    """One sequence's part of Commit."""

    sequence_id: int
    start_position: int
    num_computed_tokens: int


class Sequence(SequenceRecord):
    """Tokens, block table and progress of one sequence: `SequenceRecord` has the fields."""

    __slots__ = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V are complete in every layer, those of reserved slots included."""
        return min(self.computed)

    @property
    def is_busy(self) -> bool:
        return bool(self.running_layers) or self.is_copying

    def tokens(self, start: int, end: int) -> TokenIds:
        """A copy of the token ids of `[start, end)`."""
        return np.frombuffer(self.token_ids[start:end], dtype=np.uint32)

    def has_tokens(self, start: int, token_ids: TokenIds) -> bool:
        """True if these token ids stand at `start`."""
        return np.array_equal(self.tokens(start, start + len(token_ids)), token_ids)

    def blocks(self, start: int = 0, end: int | None = None) -> BlockIds:
        """A copy of a part of the block table."""
        return np.frombuffer(self.block_table[start:end], _INT32)

    def child(self, request_id: str, now_s: float) -> Sequence:
        """A fork: the same tokens, blocks and progress, all of it computed."""
        num_tokens = self.num_tokens
        return Sequence(
            owner=self.owner,
            request_id=request_id,
            cache_use=self.cache_use,
            extra_keys=self.extra_keys,
            token_ids=array("I", self.token_ids),
            block_table=array("i", self.block_table),
            hashes=bytearray(self.hashes),
            computed=[num_tokens] * len(self.computed),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=num_tokens,
            num_cached_blocks=self.num_cached_blocks,
            first_writable=num_tokens,
            registers=self.registers,
            created_at_s=now_s,
            account=self.account,
        )


def uint32_array(token_ids: TokenIds) -> array[int]:
    """The tokens as a growable column of 4 bytes each."""
    return array("I", np.ascontiguousarray(token_ids, dtype=np.uint32).tobytes())


def int32_array(block_ids: BlockIds) -> array[int]:
    return array("i", np.ascontiguousarray(block_ids, dtype=np.int32).tobytes())
