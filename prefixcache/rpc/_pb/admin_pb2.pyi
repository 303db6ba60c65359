from prefixcache.rpc._pb import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_ORDER_UNSPECIFIED: _ClassVar[SequenceOrder]
    SEQUENCE_ORDER_MOST_BLOCKS: _ClassVar[SequenceOrder]
    SEQUENCE_ORDER_NEWEST: _ClassVar[SequenceOrder]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_LEFT_TO_COMPUTE: _ClassVar[MissReason]
    MISS_REASON_NOT_FULL: _ClassVar[MissReason]
    MISS_REASON_CACHING_OFF: _ClassVar[MissReason]
    MISS_REASON_NOT_READ: _ClassVar[MissReason]
    MISS_REASON_PENDING: _ClassVar[MissReason]
    MISS_REASON_NOT_COMMITTED: _ClassVar[MissReason]
    MISS_REASON_NOT_WRITTEN: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_RESET: _ClassVar[MissReason]
    MISS_REASON_COLLISION: _ClassVar[MissReason]
    MISS_REASON_RESERVED: _ClassVar[MissReason]
    MISS_REASON_DIVERGED: _ClassVar[MissReason]
    MISS_REASON_NEVER_CACHED: _ClassVar[MissReason]
    MISS_REASON_UNKNOWN: _ClassVar[MissReason]

class KeyKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_KIND_UNSPECIFIED: _ClassVar[KeyKind]
    KEY_KIND_LORA: _ClassVar[KeyKind]
    KEY_KIND_MULTIMODAL_ITEM: _ClassVar[KeyKind]
    KEY_KIND_CACHE_SALT: _ClassVar[KeyKind]
    KEY_KIND_PROMPT_EMBEDS: _ClassVar[KeyKind]
SEQUENCE_ORDER_UNSPECIFIED: SequenceOrder
SEQUENCE_ORDER_MOST_BLOCKS: SequenceOrder
SEQUENCE_ORDER_NEWEST: SequenceOrder
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_LEFT_TO_COMPUTE: MissReason
MISS_REASON_NOT_FULL: MissReason
MISS_REASON_CACHING_OFF: MissReason
MISS_REASON_NOT_READ: MissReason
MISS_REASON_PENDING: MissReason
MISS_REASON_NOT_COMMITTED: MissReason
MISS_REASON_NOT_WRITTEN: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_RESET: MissReason
MISS_REASON_COLLISION: MissReason
MISS_REASON_RESERVED: MissReason
MISS_REASON_DIVERGED: MissReason
MISS_REASON_NEVER_CACHED: MissReason
MISS_REASON_UNKNOWN: MissReason
KEY_KIND_UNSPECIFIED: KeyKind
KEY_KIND_LORA: KeyKind
KEY_KIND_MULTIMODAL_ITEM: KeyKind
KEY_KIND_CACHE_SALT: KeyKind
KEY_KIND_PROMPT_EMBEDS: KeyKind

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("num_blocks", "block_size", "referenced", "evictable", "blank", "cached", "sequences", "owners", "slots_written", "evictions", "requests", "queries_tokens", "hit_tokens", "queries_blocks", "hit_blocks", "resumed_requests", "resumed_queries_tokens", "resumed_hit_tokens", "allocation_refused", "append_refused", "resets", "expired_sequences", "prefill_tokens_computed", "prefill_tokens_cached", "uptime_s", "sessions", "expired_sessions", "tenants", "calls", "quarantined", "arenas", "arena_bytes", "attached_readers", "attached_writers")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    BLANK_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_QUERIES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_REFUSED_FIELD_NUMBER: _ClassVar[int]
    APPEND_REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESETS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_READERS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_WRITERS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    referenced: int
    evictable: int
    blank: int
    cached: int
    sequences: int
    owners: int
    slots_written: int
    evictions: int
    requests: int
    queries_tokens: int
    hit_tokens: int
    queries_blocks: int
    hit_blocks: int
    resumed_requests: int
    resumed_queries_tokens: int
    resumed_hit_tokens: int
    allocation_refused: int
    append_refused: int
    resets: int
    expired_sequences: int
    prefill_tokens_computed: int
    prefill_tokens_cached: int
    uptime_s: float
    sessions: int
    expired_sessions: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    calls: _containers.RepeatedCompositeFieldContainer[CallStats]
    quarantined: int
    arenas: int
    arena_bytes: int
    attached_readers: int
    attached_writers: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., referenced: _Optional[int] = ..., evictable: _Optional[int] = ..., blank: _Optional[int] = ..., cached: _Optional[int] = ..., sequences: _Optional[int] = ..., owners: _Optional[int] = ..., slots_written: _Optional[int] = ..., evictions: _Optional[int] = ..., requests: _Optional[int] = ..., queries_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., queries_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., resumed_requests: _Optional[int] = ..., resumed_queries_tokens: _Optional[int] = ..., resumed_hit_tokens: _Optional[int] = ..., allocation_refused: _Optional[int] = ..., append_refused: _Optional[int] = ..., resets: _Optional[int] = ..., expired_sequences: _Optional[int] = ..., prefill_tokens_computed: _Optional[int] = ..., prefill_tokens_cached: _Optional[int] = ..., uptime_s: _Optional[float] = ..., sessions: _Optional[int] = ..., expired_sessions: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., calls: _Optional[_Iterable[_Union[CallStats, _Mapping]]] = ..., quarantined: _Optional[int] = ..., arenas: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., attached_readers: _Optional[int] = ..., attached_writers: _Optional[int] = ...) -> None: ...

class CallStats(_message.Message):
    __slots__ = ("method", "ended", "failed", "duration_s")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    method: str
    ended: int
    failed: int
    duration_s: float
    def __init__(self, method: _Optional[str] = ..., ended: _Optional[int] = ..., failed: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("name", "namespace", "guaranteed_blocks", "max_blocks", "held", "evictable", "evictions", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    guaranteed_blocks: int
    max_blocks: int
    held: int
    evictable: int
    evictions: int
    refused: int
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., guaranteed_blocks: _Optional[int] = ..., max_blocks: _Optional[int] = ..., held: _Optional[int] = ..., evictable: _Optional[int] = ..., evictions: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ("force",)
    FORCE_FIELD_NUMBER: _ClassVar[int]
    force: bool
    def __init__(self, force: _Optional[bool] = ...) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("num_dropped",)
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    def __init__(self, num_dropped: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "order")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    order: SequenceOrder
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., order: _Optional[_Union[SequenceOrder, str]] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ("sequence_id", "owner_digest", "num_tokens", "num_computed_tokens", "num_cached_tokens", "num_blocks", "age_s", "client_name", "tenant")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    owner_digest: str
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    age_s: float
    client_name: str
    tenant: str
    def __init__(self, sequence_id: _Optional[int] = ..., owner_digest: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., age_s: _Optional[float] = ..., client_name: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("owner_digest", "client_name", "ttl_s", "left_s", "is_connected", "num_sequences", "age_s", "tenant")
    OWNER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    owner_digest: str
    client_name: str
    ttl_s: float
    left_s: float
    is_connected: bool
    num_sequences: int
    age_s: float
    tenant: str
    def __init__(self, owner_digest: _Optional[str] = ..., client_name: _Optional[str] = ..., ttl_s: _Optional[float] = ..., left_s: _Optional[float] = ..., is_connected: _Optional[bool] = ..., num_sequences: _Optional[int] = ..., age_s: _Optional[float] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("token_ids", "extra_keys", "full_hit", "cache_use", "tenant")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    FULL_HIT_FIELD_NUMBER: _ClassVar[int]
    CACHE_USE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: _cache_pb2.ExtraKeys
    full_hit: _cache_pb2.FullHit
    cache_use: _cache_pb2.CacheUse
    tenant: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Union[_cache_pb2.ExtraKeys, _Mapping]] = ..., full_hit: _Optional[_Union[_cache_pb2.FullHit, str]] = ..., cache_use: _Optional[_Union[_cache_pb2.CacheUse, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class KeyDifference(_message.Message):
    __slots__ = ("kind", "in_prompt", "in_cache")
    KIND_FIELD_NUMBER: _ClassVar[int]
    IN_PROMPT_FIELD_NUMBER: _ClassVar[int]
    IN_CACHE_FIELD_NUMBER: _ClassVar[int]
    kind: KeyKind
    in_prompt: str
    in_cache: str
    def __init__(self, kind: _Optional[_Union[KeyKind, str]] = ..., in_prompt: _Optional[str] = ..., in_cache: _Optional[str] = ...) -> None: ...

class Divergence(_message.Message):
    __slots__ = ("first_different_token", "key_differences")
    FIRST_DIFFERENT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEY_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    first_different_token: int
    key_differences: _containers.RepeatedCompositeFieldContainer[KeyDifference]
    def __init__(self, first_different_token: _Optional[int] = ..., key_differences: _Optional[_Iterable[_Union[KeyDifference, _Mapping]]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("num_cached_tokens", "num_cached_blocks", "num_pending_tokens", "reason", "block_hash", "age_s", "divergence", "keeps_content")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    KEEPS_CONTENT_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_cached_blocks: int
    num_pending_tokens: int
    reason: MissReason
    block_hash: bytes
    age_s: float
    divergence: Divergence
    keeps_content: bool
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., reason: _Optional[_Union[MissReason, str]] = ..., block_hash: _Optional[bytes] = ..., age_s: _Optional[float] = ..., divergence: _Optional[_Union[Divergence, _Mapping]] = ..., keeps_content: _Optional[bool] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("from_number", "boot_id", "without_snapshot")
    FROM_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    from_number: int
    boot_id: bytes
    without_snapshot: bool
    def __init__(self, from_number: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., without_snapshot: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("boot_id", "next_number", "events")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    next_number: int
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    def __init__(self, boot_id: _Optional[bytes] = ..., next_number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("number", "time_s", "snapshot_started", "snapshot_ended", "stored", "removed", "cleared", "lost")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_STARTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ENDED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    number: int
    time_s: float
    snapshot_started: SnapshotStarted
    snapshot_ended: SnapshotEnded
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: CacheCleared
    lost: EventsLost
    def __init__(self, number: _Optional[int] = ..., time_s: _Optional[float] = ..., snapshot_started: _Optional[_Union[SnapshotStarted, _Mapping]] = ..., snapshot_ended: _Optional[_Union[SnapshotEnded, _Mapping]] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ..., lost: _Optional[_Union[EventsLost, _Mapping]] = ...) -> None: ...

class SnapshotStarted(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class SnapshotEnded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_hashes", "parent_hash", "token_ids", "block_size", "extra_keys")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    extra_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., extra_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsLost(_message.Message):
    __slots__ = ("end_number",)
    END_NUMBER_FIELD_NUMBER: _ClassVar[int]
    end_number: int
    def __init__(self, end_number: _Optional[int] = ...) -> None: ...
