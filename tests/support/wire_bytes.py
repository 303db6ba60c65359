"""Protobuf messages encoded by hand, in every legal spelling of a repeated number."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

SPELLINGS = ("packed", "unpacked", "pieces", "mixed")
"""One packed run; a tag for each element; several packed runs, one empty; all of these."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {
    FieldDescriptor.TYPE_FIXED32: ("<I", _FIXED32),
    FieldDescriptor.TYPE_FIXED64: ("<Q", _FIXED64),
}


def spelled(message: Message, spelling: str) -> bytes:
    """The message with its `repeated fixed32` and `repeated fixed64` fields in that spelling."""
    data = b""
    for field, value in message.ListFields():
        if field.is_repeated and field.type in _FIXED:
            data += _column(field, list(value), spelling)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in value if field.is_repeated else [value]:
                data += length_delimited(field.number, spelled(item, spelling))
        else:
            alone = type(message)()
            _copy_field(alone, field, value)
            data += alone.SerializeToString()
    return data


def length_delimited(number: int, payload: bytes) -> bytes:
    return tag(number, _BYTES) + varint(len(payload)) + payload


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def varint(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def _column(field: FieldDescriptor, values: list[int], spelling: str) -> bytes:
    form, wire_type = _FIXED[field.type]

    def packed(part: Iterable[int]) -> bytes:
        return length_delimited(field.number, b"".join(struct.pack(form, x) for x in part))

    def unpacked(part: Iterable[int]) -> bytes:
        return b"".join(tag(field.number, wire_type) + struct.pack(form, x) for x in part)

    third = len(values) // 3
    first, second, last = values[:third], values[third : 2 * third], values[2 * third :]
    match spelling:
        case "packed":
            return packed(values)
        case "unpacked":
            return unpacked(values)
        case "pieces":
            return packed(first) + packed([]) + packed(second) + packed(last)
        case _:
            return unpacked(first) + packed(second) + unpacked(last)


def _copy_field(target: Message, field: FieldDescriptor, value: object) -> None:
    if field.is_repeated:
        getattr(target, field.name).extend(value)
    else:
        setattr(target, field.name, value)
