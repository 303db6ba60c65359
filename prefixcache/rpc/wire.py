"""Services and messages by name, and the twins of messages that carry columns.

A column (`repeated fixed32` or `repeated fixed64`) is packed little-endian bytes on the wire, but
filling or reading one through protobuf's Python API costs a Python step per element. The *twin*
of a message declares each column as `bytes` under the same field number: the same bytes on the
wire, and numpy reads and writes them at once. Both sides write and read through twins. A foreign
client may send a column unpacked or in pieces, which is legal and which a twin does not see:
`prefixcache.rpc.requests` does. The twins are made from the descriptors, so there is no second
.proto to keep in step.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2, session_pb2

_FILES = tuple(module.DESCRIPTOR for module in (cache_pb2, session_pb2, attention_pb2, admin_pb2))
_Field = descriptor_pb2.FieldDescriptorProto
COLUMN_WIDTHS: dict[int, int] = {_Field.TYPE_FIXED32: 4, _Field.TYPE_FIXED64: 8}
"""Of a column's elements, in bytes, by their type."""


_IS_LITTLE = sys.byteorder == "little"
_COLUMN32, _COLUMN64 = np.dtype("<u4"), np.dtype("<u8")
_SAME_BYTES = {
    column: frozenset({np.dtype(column), np.dtype(column.replace("u", "i"))})
    for column in ("<u4", "<u8")
}
"""Types of arrays whose elements, none of them negative, are those of a column already."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: `path` is `/package.Service/Name`; requests and replies as declared.

    is_stream: any number of replies; one for each request if there are many of those too.
    is_watch: a stream of one request.
    """

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    is_stream: bool
    is_watch: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def methods() -> Iterator[Method]:
    """Every RPC of every service."""
    for file in _FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield Method(
                    service.full_name,
                    method.name,
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                    method.server_streaming,
                    method.server_streaming and not method.client_streaming,
                )


def service_names() -> list[str]:
    return sorted({method.service for method in methods()})


def _make_twins() -> dict[str, type[Message]]:
    pool = descriptor_pool.DescriptorPool()
    for file in _FILES:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            for field in message.field:
                if field.type in COLUMN_WIDTHS and field.label == _Field.LABEL_REPEATED:
                    field.type = _Field.TYPE_BYTES
                    field.label = _Field.LABEL_OPTIONAL
        pool.Add(proto)
    return {
        message: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(file.message_types_by_name[message].full_name)
        )
        for file in _FILES
        for message in file.message_types_by_name
    }


_TWINS = _make_twins()


def twin(message: str) -> Any:
    """The class of the twin of the message of that name."""
    return _TWINS[message]


def column32(values: npt.ArrayLike | array[int]) -> bytes:
    """Values as the bytes of a packed `repeated fixed32`. The caller has checked the range."""
    # Most of a reply's columns, without a further call for each.
    if _IS_LITTLE and isinstance(values, array) and values.typecode == "I":
        return values.tobytes()
    return _packed("I", values) if isinstance(values, (list, array)) else _from_array("<u4", values)


def column64(values: npt.ArrayLike | array[int]) -> bytes:
    return _packed("Q", values) if isinstance(values, (list, array)) else _from_array("<u8", values)


def repeated_bytes(field_number: int, data: bytes, width: int) -> bytes:
    """The wire form of a `repeated bytes` field: the entries of `data`, `width` bytes each.

    To be merged into its message, without a Python object for each entry. field_number is below 16
    and width below 128, so that either is one byte.
    """
    assert field_number < 16
    assert width < 128
    entries = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    rows = np.empty((len(entries), 2 + width), dtype=np.uint8)
    rows[:, 0] = field_number << 3 | 2
    rows[:, 1] = width
    rows[:, 2:] = entries
    return rows.tobytes()


def length_prefix(field_number: int, length: int) -> bytes:
    """What stands before a field of so many bytes: its tag, and the length as a varint."""
    assert field_number < 16
    prefix = bytearray((field_number << 3 | 2,))
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix)


def read_column32(data: bytes) -> npt.NDArray[np.uint32]:
    """A read-only view of a twin's column."""
    return np.frombuffer(data, _COLUMN32)


def _packed(typecode: str, values: list[int] | array[int]) -> bytes:
    """Of a list `array` makes the column several times as fast as numpy."""
    if isinstance(values, array) and values.typecode == typecode and _IS_LITTLE:
        return values.tobytes()
    column = array(typecode, values)
    if not _IS_LITTLE:
        column.byteswap()
    return column.tobytes()


def _from_array(dtype: str, values: npt.ArrayLike) -> bytes:
    if isinstance(values, np.ndarray) and values.dtype in _SAME_BYTES[dtype]:
        return values.tobytes()
    return np.asarray(values, dtype=dtype).tobytes()


def read_column64(data: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, _COLUMN64)
