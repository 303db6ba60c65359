"""Ids and results that core, server, clients and tools share.

Letters used for shapes everywhere: N blocks of the pool, B tokens a block, L layers, Hq query
heads, Hkv KV heads, D head dim, S sequences of a batch, T new tokens of a batch.

Glossary: a *block* is B consecutive tokens and their K/V of all layers; a *slot* is one token's
place, `block_id * B + offset`; a *block table* maps a sequence's logical blocks to block ids.
A block is *referenced* (a sequence or a call has it), *quarantined* (none has, but a process
outside may still write to it) or free; a free block is *evictable* if it is cached (findable by its
hash) and *blank* if not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
SequenceId = NewType("SequenceId", int)

BlockIds = npt.NDArray[np.int32]
"""Block ids, `[n] int32`."""
TokenIds = npt.NDArray[np.uint32]
"""Token ids, `[n] uint32`."""


class PoolAccess(enum.IntEnum):
    """What a process of the daemon's host may do with the pool's memory itself."""

    NONE = 0
    READ = 1
    WRITE = 2


class CacheUse(enum.IntEnum):
    """How a sequence uses the cache. The values are the ones of the wire.

    reads, writes: members have both as plain attributes; each Allocate asks for them.
    """

    reads: bool
    writes: bool

    READ_WRITE = 1
    NO_READ = 2
    """Takes no hits (and is not counted as a query); its blocks are registered."""
    NO_WRITE = 3
    """Takes hits; registers nothing."""
    NONE = 4

    def __init__(self, value: int) -> None:
        self.reads = self.name in ("READ_WRITE", "NO_WRITE")
        self.writes = self.name in ("READ_WRITE", "NO_READ")


class FullHit(enum.IntEnum):
    """What is left to compute when every token of a prompt is cached."""

    LAST_TOKEN = 1
    """The last block is shared too; its last token is computed again and not written."""
    LAST_BLOCK = 2
    """The last block is computed again, in a private block."""


class SequenceOrder(enum.IntEnum):
    """Which live sequences an operator sees first. The values are the ones of the wire."""

    OLDEST = 0
    MOST_BLOCKS = 1
    NEWEST = 2


class ResultCode(enum.IntEnum):
    """Outcome of one row of a batch call."""

    OK = 1
    NOT_FOUND = 2
    WRONG_POSITION = 3
    BUSY = 4
    NO_ROOM = 5
    EXCEEDS_POOL = 6
    BEYOND_TOKENS = 7
    QUOTA_EXCEEDED = 8


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter. A reload of the same name must come with another `path`."""

    name: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image or other item whose placeholder tokens stand at `offset` (absolute, in tokens)."""

    identifier: str
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Positions given as embeddings; their token ids are 0.

    `digests` holds one 32-byte SHA-256 for each block that `[offset, offset + num_tokens)`
    overlaps: of the bytes of that block's slice of the embeddings.
    """

    offset: int
    num_tokens: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides the token ids tells blocks apart. Empty strings and tuples mean absent."""

    lora: Lora | None = None
    multimodal_items: tuple[MultimodalItem, ...] = ()
    cache_salt: str = ""
    prompt_embeds: tuple[PromptEmbeds, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cache_salt or self.reaches_later_blocks)

    @property
    def reaches_later_blocks(self) -> bool:
        """False if only the first block of a prompt may have one of them."""
        return bool(self.lora or self.multimodal_items or self.prompt_embeds)


NO_EXTRA_KEYS = ExtraKeys()


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How attention weighs the tokens that a query sees. The defaults are plain attention.

    A query at position p has for the key at position j <= p the score
    `cap(scale * q·k) + slope * (j - p)`, and the weights are the softmax of the scores.
    """

    scale: float | None = None
    """None is 1/sqrt(D); for latent K/V there is no default."""
    window: int | None = None
    """Tokens that a query sees, itself included: j > p - window. None is all."""
    soft_cap: float | None = None
    """`cap(s) = soft_cap * tanh(s / soft_cap)`; None is s itself (Gemma 2, arXiv 2408.00118)."""
    alibi_slopes: tuple[float, ...] = ()
    """One for each query head; empty is 0 (ALiBi, arXiv 2108.12409)."""
    sinks: tuple[float, ...] = ()
    """One for each query head: a score that takes its share of the weights and has no value (as in
    gpt-oss, after arXiv 2309.17453). Empty is none."""

    def scale_for(self, head_dim: int) -> float:
        """The scale, or the default for keys of `head_dim` elements."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN_ATTENTION = AttentionOptions()


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A dense tensor in host memory: row-major, little-endian bytes.

    dtype: "float32", "float16" or "bfloat16". data: nobody changes them, but in memory that is
    shared with another process, which should not.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the K/V of `source` go to `destination`, which took its place."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What Allocate would find now. Valid until the next change of the pool.

    `num_blocks_needed` counts the free blocks that Allocate would use up: new blocks, and hit
    blocks that are free now. Allocate succeeds when it is at most `num_blocks_free`.
    """

    num_cached_tokens: int
    num_cached_blocks: int
    num_blocks_needed: int
    num_blocks_free: int
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of all full blocks of the prompt, if asked for."""
    num_pending_tokens: int = 0
    """How many more tokens will be cached once live sequences have computed theirs."""


class MissReason(enum.IntEnum):
    """Why the first block of a prompt that is no hit is none. The values are those of the wire."""

    LEFT_TO_COMPUTE = 1
    """All full blocks that may be hits are: of a full hit a part is always computed again."""
    NOT_FULL = 2
    """Its tokens fill no block, and only full blocks are cached."""
    CACHING_OFF = 3
    NOT_READ = 4
    """The prompt is not to read the cache."""
    PENDING = 5
    """A live sequence is computing it, and it will be cached then."""
    NOT_COMMITTED = 6
    """A live sequence has it, and has not committed it."""
    NOT_WRITTEN = 7
    """A live sequence has it and never caches it: it does not write to the cache, or a forced reset
    or a collision keeps it from that."""
    EVICTED = 8
    """It was evicted to make room."""
    RESET = 9
    """It was cached when the cache was last reset."""
    COLLISION = 10
    """Its hash is taken by other content."""
    RESERVED = 11
    """It is cached, and taking it would need a block that is guaranteed to other tenants."""
    DIVERGED = 12
    """It was not cached as far as is known; the cached block most like it differs in tokens or
    extra keys."""
    NEVER_CACHED = 13
    """It was not cached since the start, or since the last reset."""
    UNKNOWN = 14
    """It is not cached: it never was, or it was evicted too long ago to be remembered."""


class KeyKind(enum.IntEnum):
    """Kinds of extra keys. The values are the ones of the wire."""

    LORA = 1
    MULTIMODAL_ITEM = 2
    CACHE_SALT = 3
    PROMPT_EMBEDS = 4


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """An extra key in which two blocks differ; empty where a block has none.

    in_prompt, in_cache: names, identifiers with the token that they begin at, and digests of salts
    and embeddings.
    """

    kind: KeyKind
    in_prompt: str
    in_cache: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt has no more hits. Valid until the next change of the pool.

    The block that missed is block `num_cached_blocks` of the prompt.

    block_hash: of that block; empty if it has none. age_s: of EVICTED and RESET, how long ago.
    first_different_token: of DIVERGED, the first token of the prompt that the nearest cached chain
    has otherwise; None if it has the block's tokens. key_differences: of DIVERGED. keeps_content:
    whether the daemon keeps the tokens of all cached blocks, so that it can tell any divergence.
    """

    num_cached_tokens: int
    num_cached_blocks: int
    num_pending_tokens: int
    reason: MissReason
    block_hash: bytes
    age_s: float | None
    first_different_token: int | None
    key_differences: tuple[KeyDifference, ...]
    keeps_content: bool


class AllocateResult(NamedTuple):
    """A new sequence; a named tuple, which is made faster than a frozen dataclass.

    block_ids: its whole block table, `[ceil((n + lookahead) / B)]`.
    num_cached_blocks: leading ones of the table that are hits; nothing is to be written there.
    num_pending_tokens: how many of the tokens after the cached ones other live sequences are
    computing too.
    """

    sequence_id: SequenceId
    num_cached_tokens: int
    num_cached_blocks: int
    block_ids: BlockIds
    num_pending_tokens: int


class BlockHolder(NamedTuple):
    """One of those who hold most blocks when there is no room for more.

    client_name: of its session; empty without one. owner_digest: as in the list of sequences.
    num_blocks: in the tables of its sequences; what they share counts once for each.
    """

    client_name: str
    owner_digest: str
    num_blocks: int


class AppendResult(NamedTuple):
    """One row of Append. `new_block_ids` were added at the end of the block table, in order.

    No dataclass as other results are: those take five times as long to make, and a batch has one a
    sequence.
    """

    code: ResultCode
    new_block_ids: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()


class CommitResult(NamedTuple):
    """One row of Commit: leading blocks of the sequence that are findable or stand by."""

    code: ResultCode
    num_cached_blocks: int = 0
