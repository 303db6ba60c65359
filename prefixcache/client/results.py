"""What the daemon says of itself and of its sequences. Values only; other results: `types`."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.storage.layout import Layout
from prefixcache.types import SequenceId


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A daemon, valid until it restarts (then `boot_id` is another)."""

    api_version: str
    version: str
    """Of the daemon."""
    boot_id: bytes
    """16 random bytes, new at each start; sequences of another boot are unknown."""
    layout: Layout | None
    """Shape of the K/V storage, KVLayout or LatentLayout; None without (`--storage none`)."""
    fingerprint: bytes
    """32 bytes: digest of model, revision, layout, block size and hash recipe."""
    num_blocks: int
    block_size: int
    """Tokens."""
    device: str
    """"cpu" or "cuda"; "none" without K/V storage."""
    hash_algorithm: str
    hash_recipe_version: int
    hash_seeded: bool
    """False if NONE_HASH is random at each start."""
    none_hash_digest: bytes
    """SHA-256 of NONE_HASH: equal for two daemons whose hashes agree."""
    verify_hits: bool
    prefix_caching: bool
    max_message_bytes: int
    max_fork_children: int
    max_step_allocates: int
    capabilities: tuple[str, ...]
    """"attention" with K/V storage, "commit" without."""
    model_name: str
    model_revision: str
    owner_ttl_s: float
    """Sequences of a client without a session that makes no call for this long are freed."""
    max_sessions: int
    max_session_ttl_s: float
    max_sequences_per_session: int
    """Also of a client without a session."""
    reconnect_grace_s: float
    """A session ends this long after its connection broke, unless its client is back. Seconds."""
    max_tokens_per_call: int
    """Of a prompt, or of all rows of a batch, with the lookahead."""
    max_queued_calls: int
    """Calls that wait for a thread of the daemon; one more is refused."""
    max_queue_wait_s: float
    max_owners: int
    """Clients without a session that have sequences."""
    max_connections: int
    """To one address of the daemon."""
    max_streams_per_connection: int
    """Calls and streams; more of them wait in the client."""
    max_step_streams: int
    max_wait_pending_s: float
    """Longest time for which a sequence may wait for blocks that another is computing."""
    max_pending_waits: int
    """Sequences that wait so; one more does not."""
    max_rows_per_call: int
    """Sequences in one batch."""
    max_fields_per_request: int
    """Those of the messages in it included; a column is one."""
    max_arena_bytes: int
    """Of memory that a client shares with it for tensors; 0 if it takes none."""
    core: str
    """Form of the block manager's core: "native" (compiled) or "python"."""


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One live sequence of any client, as an operator sees it."""

    sequence_id: SequenceId
    owner_digest: str
    """Equal for the sequences of one client, and no key to them."""
    num_tokens: int
    num_computed_tokens: int
    """Tokens with K/V in all layers."""
    num_cached_tokens: int
    """Tokens that were cached when it was allocated."""
    num_blocks: int
    age_s: float
    client_name: str
    """Of its session; empty without one."""
    tenant: str
    """Whose client it is; empty without access control."""


@dataclass(frozen=True, slots=True)
class SequencePage:
    """A page of live sequences, oldest first; `next_page_token` is empty on the last one."""

    sequences: tuple[SequenceInfo, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session of any client, as an operator sees it."""

    owner_digest: str
    """The one of its sequences, and no key to them."""
    client_name: str
    ttl_s: float
    left_s: float
    """Until it ends if nothing more is heard of its client."""
    is_connected: bool
    """It has a KeepAlive stream now."""
    num_sequences: int
    age_s: float
    tenant: str
    """Whose client it is; empty without access control."""


@dataclass(frozen=True, slots=True)
class SessionPage:
    """A page of sessions, oldest first; `next_page_token` is empty on the last one."""

    sessions: tuple[SessionInfo, ...]
    next_page_token: str
