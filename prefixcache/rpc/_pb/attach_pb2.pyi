from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "writable", "token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    writable: bool
    token: str
    def __init__(self, session_id: _Optional[bytes] = ..., writable: _Optional[bool] = ..., token: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("refusal", "boot_id", "layout_fingerprint", "num_blocks", "key_scales", "value_scales", "cuda")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    refusal: bytes
    boot_id: bytes
    layout_fingerprint: bytes
    num_blocks: int
    key_scales: _containers.RepeatedScalarFieldContainer[float]
    value_scales: _containers.RepeatedScalarFieldContainer[float]
    cuda: CudaMemory
    def __init__(self, refusal: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., layout_fingerprint: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., key_scales: _Optional[_Iterable[float]] = ..., value_scales: _Optional[_Iterable[float]] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("device_uuid", "handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTER_HANDLE_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENT_SYNC_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    handle: bytes
    size_bytes: int
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    def __init__(self, device_uuid: _Optional[str] = ..., handle: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., ref_counter_handle: _Optional[bytes] = ..., ref_counter_offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ..., event_sync_required: _Optional[bool] = ...) -> None: ...
