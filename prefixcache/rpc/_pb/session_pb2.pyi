from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("ttl_s", "client_name", "request_id")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    client_name: str
    request_id: str
    def __init__(self, ttl_s: _Optional[float] = ..., client_name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "ttl_s", "boot_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    ttl_s: float
    boot_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("ttl_s", "boot_id")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    boot_id: bytes
    def __init__(self, ttl_s: _Optional[float] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("num_sequences",)
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    def __init__(self, num_sequences: _Optional[int] = ...) -> None: ...
