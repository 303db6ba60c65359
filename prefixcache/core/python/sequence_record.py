"""The fields of one live sequence, as a dataclass."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from prefixcache.types import CacheUse, CommitResult, ExtraKeys, SequenceId

_NO_ID = SequenceId(0)


@dataclass(eq=False, slots=True)
class SequenceRecord:
    """Tokens, block table and progress of one sequence.

    sequence_id, serial: 0 until `LiveSequences.add`.
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
    created_at_s: float
    account: int = 0
    num_lookahead_tokens: int = 0
    sequence_id: SequenceId = _NO_ID
    serial: int = 0
    last_attention_start: dict[int, int] = field(default_factory=dict)
    last_call: tuple[Any, ...] | None = None
    last_reply: Any = None
    commit_before: tuple[tuple[Any, ...], CommitResult] | None = None
    running_layers: set[int] = field(default_factory=set)
    is_copying: bool = False
    copy_holds: list[int] = field(default_factory=list)
    writers: set[int] | None = None

    def note_applied(self, call: tuple[object, ...], reply: object) -> None:
        """A state call is done, and a repeat of it can be answered."""
        before = self.last_call
        is_step = call[0] == "append" and before is not None and before[0] == "commit"
        self.commit_before = (before, self.last_reply) if is_step and before else None
        self.last_call = call
        self.last_reply = reply
        self.last_attention_start.clear()
