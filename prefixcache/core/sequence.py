"""The record of one live sequence, and the requests of the calls on it.

A `Sequence` is changed only by modules of the core, under its lock.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from prefixcache.core.hashing import Chain
from prefixcache.types import (
    NO_EXTRA_KEYS,
    BlockIds,
    CacheUse,
    CommitResult,
    ExtraKeys,
    SequenceId,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a request and the chain of their full blocks (None with caching off)."""

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


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens, block table and progress of one sequence.

    computed[layer]: tokens whose K/V of that layer are in place; one entry without storage.
    hashes: of the full blocks, one digest after another, kept while the sequence may register
    blocks.
    num_cached_blocks: leading blocks of the table that are registered or stand by.
    first_writable: K/V of positions below it are never written (they are somebody's hit).
    last_call, last_reply: what a repeat of the last applied state call is recognised by and
    answered with; an attention call clears it. Of an Append, the tokens are those of the sequence.
    account: of the pool, which its blocks are charged to.
    commit_before: if the last call is an Append, the Commit just before it and its reply. An
    engine's step has both, and is repeated as a whole.
    writers: of a sequence that has ended with its session: attachments whose processes may still
    write to its blocks. None of one that its client has freed.
    last_attention_start: by layer, where its last applied attention call began; a state call clears
    it.
    """

    sequence_id: SequenceId
    serial: int
    owner: bytes
    request_id: str
    cache_use: CacheUse
    extra_keys: ExtraKeys
    token_ids: array[int]
    block_table: array[int]
    hashes: bytearray
    computed: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_cached_blocks: int
    first_writable: int
    registers: bool
    last_attention_start: dict[int, int]
    created_at_s: float
    account: int = 0
    num_lookahead_tokens: int = 0
    last_call: tuple[Any, ...] | None = None
    last_reply: Any = None
    commit_before: tuple[tuple[Any, ...], CommitResult] | None = None
    running_layers: set[int] = field(default_factory=set)
    is_copying: bool = False
    copy_holds: list[int] = field(default_factory=list)
    writers: set[int] | None = None

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
        return np.frombuffer(self.block_table[start:end], dtype=np.int32)

    def note_applied(self, call: tuple[object, ...], reply: object) -> None:
        """A state call is done, and a repeat of it can be answered."""
        before = self.last_call
        is_step = call[0] == "append" and before is not None and before[0] == "commit"
        self.commit_before = (before, self.last_reply) if is_step and before else None
        self.last_call = call
        self.last_reply = reply
        self.last_attention_start.clear()

    def child(
        self, sequence_id: SequenceId, serial: int, request_id: str, now_s: float
    ) -> Sequence:
        """A fork: the same tokens, blocks and progress, all of it computed."""
        num_tokens = self.num_tokens
        return Sequence(
            sequence_id=sequence_id,
            serial=serial,
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
            last_attention_start={},
            created_at_s=now_s,
            account=self.account,
        )


def uint32_array(token_ids: TokenIds) -> array[int]:
    """The tokens as a growable column of 4 bytes each."""
    return array("I", np.ascontiguousarray(token_ids, dtype=np.uint32).tobytes())


def int32_array(block_ids: BlockIds) -> array[int]:
    return array("i", np.ascontiguousarray(block_ids, dtype=np.int32).tobytes())
