from prefixcache.rpc._pb import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType

class ArenaSpan(_message.Message):
    __slots__ = ("arena_id", "offset", "num_bytes")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    offset: int
    num_bytes: int
    def __init__(self, arena_id: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("data_type", "shape", "data", "arena")
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    arena: ArenaSpan
    def __init__(self, data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., arena: _Optional[_Union[ArenaSpan, _Mapping]] = ...) -> None: ...

class AttentionBatch(_message.Message):
    __slots__ = ("owner", "layer", "sequence_ids", "start_positions", "num_tokens", "scale", "window", "soft_cap", "alibi_slopes", "sinks", "order")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    ALIBI_SLOPES_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    layer: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    start_positions: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    scale: float
    window: int
    soft_cap: float
    alibi_slopes: _containers.RepeatedScalarFieldContainer[float]
    sinks: _containers.RepeatedScalarFieldContainer[float]
    order: _cache_pb2.CallOrder
    def __init__(self, owner: _Optional[bytes] = ..., layer: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., start_positions: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., scale: _Optional[float] = ..., window: _Optional[int] = ..., soft_cap: _Optional[float] = ..., alibi_slopes: _Optional[_Iterable[float]] = ..., sinks: _Optional[_Iterable[float]] = ..., order: _Optional[_Union[_cache_pb2.CallOrder, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("batch", "q", "k", "v", "out")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    out: ArenaSpan
    def __init__(self, batch: _Optional[_Union[AttentionBatch, _Mapping]] = ..., q: _Optional[_Union[Tensor, _Mapping]] = ..., k: _Optional[_Union[Tensor, _Mapping]] = ..., v: _Optional[_Union[Tensor, _Mapping]] = ..., out: _Optional[_Union[ArenaSpan, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("out",)
    OUT_FIELD_NUMBER: _ClassVar[int]
    out: Tensor
    def __init__(self, out: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("batch", "q", "k", "v", "out")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    out: ArenaSpan
    def __init__(self, batch: _Optional[_Union[AttentionBatch, _Mapping]] = ..., q: _Optional[_Union[Tensor, _Mapping]] = ..., k: _Optional[_Union[Tensor, _Mapping]] = ..., v: _Optional[_Union[Tensor, _Mapping]] = ..., out: _Optional[_Union[ArenaSpan, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("out",)
    OUT_FIELD_NUMBER: _ClassVar[int]
    out: Tensor
    def __init__(self, out: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
