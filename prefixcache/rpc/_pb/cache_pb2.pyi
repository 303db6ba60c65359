from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_USE_UNSPECIFIED: _ClassVar[CacheUse]
    CACHE_USE_READ_WRITE: _ClassVar[CacheUse]
    CACHE_USE_NO_READ: _ClassVar[CacheUse]
    CACHE_USE_NO_WRITE: _ClassVar[CacheUse]
    CACHE_USE_NONE: _ClassVar[CacheUse]

class FullHit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FULL_HIT_UNSPECIFIED: _ClassVar[FullHit]
    FULL_HIT_LAST_TOKEN: _ClassVar[FullHit]
    FULL_HIT_LAST_BLOCK: _ClassVar[FullHit]

class ResultCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESULT_CODE_UNSPECIFIED: _ClassVar[ResultCode]
    RESULT_CODE_OK: _ClassVar[ResultCode]
    RESULT_CODE_NOT_FOUND: _ClassVar[ResultCode]
    RESULT_CODE_WRONG_POSITION: _ClassVar[ResultCode]
    RESULT_CODE_BUSY: _ClassVar[ResultCode]
    RESULT_CODE_NO_ROOM: _ClassVar[ResultCode]
    RESULT_CODE_EXCEEDS_POOL: _ClassVar[ResultCode]
    RESULT_CODE_BEYOND_TOKENS: _ClassVar[ResultCode]
    RESULT_CODE_QUOTA_EXCEEDED: _ClassVar[ResultCode]
CACHE_USE_UNSPECIFIED: CacheUse
CACHE_USE_READ_WRITE: CacheUse
CACHE_USE_NO_READ: CacheUse
CACHE_USE_NO_WRITE: CacheUse
CACHE_USE_NONE: CacheUse
FULL_HIT_UNSPECIFIED: FullHit
FULL_HIT_LAST_TOKEN: FullHit
FULL_HIT_LAST_BLOCK: FullHit
RESULT_CODE_UNSPECIFIED: ResultCode
RESULT_CODE_OK: ResultCode
RESULT_CODE_NOT_FOUND: ResultCode
RESULT_CODE_WRONG_POSITION: ResultCode
RESULT_CODE_BUSY: ResultCode
RESULT_CODE_NO_ROOM: ResultCode
RESULT_CODE_EXCEEDS_POOL: ResultCode
RESULT_CODE_BEYOND_TOKENS: ResultCode
RESULT_CODE_QUOTA_EXCEEDED: ResultCode

class Lora(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class MultimodalItem(_message.Message):
    __slots__ = ("identifier", "offset", "num_tokens")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    num_tokens: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PromptEmbeds(_message.Message):
    __slots__ = ("offset", "num_tokens", "digests")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    num_tokens: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExtraKeys(_message.Message):
    __slots__ = ("lora", "multimodal_items", "cache_salt", "prompt_embeds")
    LORA_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_ITEMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    lora: Lora
    multimodal_items: _containers.RepeatedCompositeFieldContainer[MultimodalItem]
    cache_salt: str
    prompt_embeds: _containers.RepeatedCompositeFieldContainer[PromptEmbeds]
    def __init__(self, lora: _Optional[_Union[Lora, _Mapping]] = ..., multimodal_items: _Optional[_Iterable[_Union[MultimodalItem, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., prompt_embeds: _Optional[_Iterable[_Union[PromptEmbeds, _Mapping]]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ("expected_fingerprint",)
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    expected_fingerprint: bytes
    def __init__(self, expected_fingerprint: _Optional[bytes] = ...) -> None: ...

class Quantization(_message.Message):
    __slots__ = ("dtype", "scales")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    scales: str
    def __init__(self, dtype: _Optional[str] = ..., scales: _Optional[str] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "dtype", "block_bytes", "value_dim", "quantization", "latent_dim", "rope_dim")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    LATENT_DIM_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIM_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int
    value_dim: int
    quantization: Quantization
    latent_dim: int
    rope_dim: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_bytes: _Optional[int] = ..., value_dim: _Optional[int] = ..., quantization: _Optional[_Union[Quantization, _Mapping]] = ..., latent_dim: _Optional[int] = ..., rope_dim: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_fork_children", "max_step_allocates", "max_sessions", "max_session_ttl_s", "max_sequences_per_session", "reconnect_grace_s", "max_tokens_per_call", "max_queued_calls", "max_queue_wait_s", "max_owners", "max_connections", "max_streams_per_connection", "max_step_streams", "max_wait_pending_s", "max_pending_waits", "max_rows_per_call", "max_fields_per_request", "max_arena_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FORK_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_ALLOCATES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_PER_SESSION_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_OWNERS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_PER_CONNECTION_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_PENDING_S_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_WAITS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELDS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAX_ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_fork_children: int
    max_step_allocates: int
    max_sessions: int
    max_session_ttl_s: float
    max_sequences_per_session: int
    reconnect_grace_s: float
    max_tokens_per_call: int
    max_queued_calls: int
    max_queue_wait_s: float
    max_owners: int
    max_connections: int
    max_streams_per_connection: int
    max_step_streams: int
    max_wait_pending_s: float
    max_pending_waits: int
    max_rows_per_call: int
    max_fields_per_request: int
    max_arena_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_fork_children: _Optional[int] = ..., max_step_allocates: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_session_ttl_s: _Optional[float] = ..., max_sequences_per_session: _Optional[int] = ..., reconnect_grace_s: _Optional[float] = ..., max_tokens_per_call: _Optional[int] = ..., max_queued_calls: _Optional[int] = ..., max_queue_wait_s: _Optional[float] = ..., max_owners: _Optional[int] = ..., max_connections: _Optional[int] = ..., max_streams_per_connection: _Optional[int] = ..., max_step_streams: _Optional[int] = ..., max_wait_pending_s: _Optional[float] = ..., max_pending_waits: _Optional[int] = ..., max_rows_per_call: _Optional[int] = ..., max_fields_per_request: _Optional[int] = ..., max_arena_bytes: _Optional[int] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("api_version", "server_version", "boot_id", "layout", "layout_fingerprint", "num_blocks", "block_size", "device", "hash_algorithm", "hash_recipe_version", "hash_seeded", "none_hash_digest", "verify_hits", "prefix_caching", "limits", "capabilities", "model_name", "model_revision", "owner_ttl_s", "core")
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_RECIPE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HASH_SEEDED_FIELD_NUMBER: _ClassVar[int]
    NONE_HASH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERIFY_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    OWNER_TTL_S_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    api_version: str
    server_version: str
    boot_id: bytes
    layout: KVLayout
    layout_fingerprint: bytes
    num_blocks: int
    block_size: int
    device: str
    hash_algorithm: str
    hash_recipe_version: int
    hash_seeded: bool
    none_hash_digest: bytes
    verify_hits: bool
    prefix_caching: bool
    limits: Limits
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    model_name: str
    model_revision: str
    owner_ttl_s: float
    core: str
    def __init__(self, api_version: _Optional[str] = ..., server_version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., layout_fingerprint: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., device: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_recipe_version: _Optional[int] = ..., hash_seeded: _Optional[bool] = ..., none_hash_digest: _Optional[bytes] = ..., verify_hits: _Optional[bool] = ..., prefix_caching: _Optional[bool] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., model_name: _Optional[str] = ..., model_revision: _Optional[str] = ..., owner_ttl_s: _Optional[float] = ..., core: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("token_ids", "extra_keys", "num_lookahead_tokens", "full_hit", "want_hashes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_HIT_FIELD_NUMBER: _ClassVar[int]
    WANT_HASHES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: ExtraKeys
    num_lookahead_tokens: int
    full_hit: FullHit
    want_hashes: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ..., num_lookahead_tokens: _Optional[int] = ..., full_hit: _Optional[_Union[FullHit, str]] = ..., want_hashes: _Optional[bool] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("num_cached_tokens", "num_cached_blocks", "num_blocks_needed", "num_blocks_free", "block_hashes", "num_pending_tokens")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_cached_blocks: int
    num_blocks_needed: int
    num_blocks_free: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_pending_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_blocks_needed: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., num_pending_tokens: _Optional[int] = ...) -> None: ...

class CallOrder(_message.Message):
    __slots__ = ("number", "settled")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    number: int
    settled: int
    def __init__(self, number: _Optional[int] = ..., settled: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("owner", "request_id", "token_ids", "extra_keys", "num_lookahead_tokens", "cache_use", "full_hit", "layout_fingerprint", "resumed", "order", "wait_pending_ms")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_USE_FIELD_NUMBER: _ClassVar[int]
    FULL_HIT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    WAIT_PENDING_MS_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: ExtraKeys
    num_lookahead_tokens: int
    cache_use: CacheUse
    full_hit: FullHit
    layout_fingerprint: bytes
    resumed: bool
    order: CallOrder
    wait_pending_ms: int
    def __init__(self, owner: _Optional[bytes] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ..., num_lookahead_tokens: _Optional[int] = ..., cache_use: _Optional[_Union[CacheUse, str]] = ..., full_hit: _Optional[_Union[FullHit, str]] = ..., layout_fingerprint: _Optional[bytes] = ..., resumed: _Optional[bool] = ..., order: _Optional[_Union[CallOrder, _Mapping]] = ..., wait_pending_ms: _Optional[int] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("sequence_id", "num_cached_tokens", "block_ids", "num_pending_tokens", "num_cached_blocks")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_cached_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_pending_tokens: int
    num_cached_blocks: int
    def __init__(self, sequence_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_pending_tokens: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ...) -> None: ...

class AppendExtraKeys(_message.Message):
    __slots__ = ("row", "extra_keys")
    ROW_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    row: int
    extra_keys: ExtraKeys
    def __init__(self, row: _Optional[int] = ..., extra_keys: _Optional[_Union[ExtraKeys, _Mapping]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("owner", "sequence_ids", "start_positions", "num_tokens", "token_ids", "num_kv_valid", "num_lookahead_tokens", "extra_keys", "order")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_VALID_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    start_positions: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_kv_valid: _containers.RepeatedScalarFieldContainer[int]
    num_lookahead_tokens: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: _containers.RepeatedCompositeFieldContainer[AppendExtraKeys]
    order: CallOrder
    def __init__(self, owner: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., start_positions: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_kv_valid: _Optional[_Iterable[int]] = ..., num_lookahead_tokens: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Iterable[_Union[AppendExtraKeys, _Mapping]]] = ..., order: _Optional[_Union[CallOrder, _Mapping]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("result_codes", "num_new_blocks", "new_block_ids", "num_copies", "copy_sources", "copy_destinations", "num_blocks_free")
    RESULT_CODES_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    result_codes: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_copies: _containers.RepeatedScalarFieldContainer[int]
    copy_sources: _containers.RepeatedScalarFieldContainer[int]
    copy_destinations: _containers.RepeatedScalarFieldContainer[int]
    num_blocks_free: int
    def __init__(self, result_codes: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., new_block_ids: _Optional[_Iterable[int]] = ..., num_copies: _Optional[_Iterable[int]] = ..., copy_sources: _Optional[_Iterable[int]] = ..., copy_destinations: _Optional[_Iterable[int]] = ..., num_blocks_free: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("owner", "sequence_ids", "start_positions", "num_computed_tokens", "order")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    start_positions: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    order: CallOrder
    def __init__(self, owner: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., start_positions: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[_Iterable[int]] = ..., order: _Optional[_Union[CallOrder, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("result_codes", "num_cached_blocks")
    RESULT_CODES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    result_codes: _containers.RepeatedScalarFieldContainer[int]
    num_cached_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, result_codes: _Optional[_Iterable[int]] = ..., num_cached_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("owner", "sequence_id", "num_tokens", "request_ids", "order")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    sequence_id: int
    num_tokens: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    order: CallOrder
    def __init__(self, owner: _Optional[bytes] = ..., sequence_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., order: _Optional[_Union[CallOrder, _Mapping]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("owner", "sequence_id", "num_tokens_before", "num_tokens_after", "order")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_AFTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    sequence_id: int
    num_tokens_before: int
    num_tokens_after: int
    order: CallOrder
    def __init__(self, owner: _Optional[bytes] = ..., sequence_id: _Optional[int] = ..., num_tokens_before: _Optional[int] = ..., num_tokens_after: _Optional[int] = ..., order: _Optional[_Union[CallOrder, _Mapping]] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("dropped_block_ids",)
    DROPPED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    dropped_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dropped_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("owner", "sequence_ids", "request_ids", "order")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    order: CallOrder
    def __init__(self, owner: _Optional[bytes] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[str]] = ..., order: _Optional[_Union[CallOrder, _Mapping]] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("result_codes",)
    RESULT_CODES_FIELD_NUMBER: _ClassVar[int]
    result_codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, result_codes: _Optional[_Iterable[int]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("free", "commit", "append", "allocates")
    FREE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    ALLOCATES_FIELD_NUMBER: _ClassVar[int]
    free: FreeRequest
    commit: CommitRequest
    append: AppendRequest
    allocates: _containers.RepeatedCompositeFieldContainer[AllocateRequest]
    def __init__(self, free: _Optional[_Union[FreeRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., append: _Optional[_Union[AppendRequest, _Mapping]] = ..., allocates: _Optional[_Iterable[_Union[AllocateRequest, _Mapping]]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("free", "commit", "append", "allocates", "errors")
    FREE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    ALLOCATES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    free: FreeResponse
    commit: CommitResponse
    append: AppendResponse
    allocates: _containers.RepeatedCompositeFieldContainer[AllocateResponse]
    errors: _containers.RepeatedCompositeFieldContainer[StepError]
    def __init__(self, free: _Optional[_Union[FreeResponse, _Mapping]] = ..., commit: _Optional[_Union[CommitResponse, _Mapping]] = ..., append: _Optional[_Union[AppendResponse, _Mapping]] = ..., allocates: _Optional[_Iterable[_Union[AllocateResponse, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[StepError, _Mapping]]] = ...) -> None: ...

class StepError(_message.Message):
    __slots__ = ("call", "index", "status")
    CALL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    call: str
    index: int
    status: bytes
    def __init__(self, call: _Optional[str] = ..., index: _Optional[int] = ..., status: _Optional[bytes] = ...) -> None: ...
