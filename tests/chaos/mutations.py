"""Requests made bad: every field that a message type has, and the bytes of a message themselves."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tests.support.wire_bytes import length_delimited, tag, varint

Path = tuple[str, ...]
_MAX_DEPTH = 4
_HUGE_COUNTS = (300, 5_000)
_GROUP_START, _VARINT, _FIXED64, _BYTES, _FIXED32 = 3, 0, 1, 2, 5

_UNSIGNED = (0, 1, 2, 3, 7, 2**7, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, 3e38, *map(float, ("nan", "inf", "-inf")))
_BOUNDARIES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_UINT32: _UNSIGNED,
    FieldDescriptor.CPPTYPE_UINT64: (*_UNSIGNED, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: (*_FLOATS, 1e308, 1e-320, 3600.0, 3600.1, 0.999),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 0, 1, 2, 3, 4, 5, 99, 2**31 - 1, -(2**31)),
}
_LENGTHS = (0, 1, 15, 16, 17, 23, 24, 25, 31, 32, 33, 127, 128, 129, 255, 256, 257, 4096, 4097)
_TEXTS = ("", "\0", "é" * 129, "\U0001f600" * 64, "-1", "99999999999999999999", "x" * 20_000)


def field_paths(message_type: Descriptor, depth: int = 0) -> Iterator[Path]:
    """Every field, those of messages within included."""
    for field in message_type.fields:
        yield (field.name,)
        if field.message_type is not None and depth < _MAX_DEPTH:
            for path in field_paths(field.message_type, depth + 1):
                yield (field.name, *path)


def change_field(message: Message, path: Path, rng: random.Random) -> None:
    """Give the field at the end of the path a value of the edge, or another count."""
    *parents, name = path
    for parent in parents:
        inner = getattr(message, parent)
        if message.DESCRIPTOR.fields_by_name[parent].is_repeated:
            message = rng.choice(inner) if len(inner) else inner.add()
        else:
            inner.SetInParent()
            message = inner
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        _change_column(getattr(message, name), field, rng)
    elif field.message_type is not None:
        message.ClearField(name)
        if rng.random() < 0.5:
            getattr(message, name).SetInParent()
    elif rng.random() < 0.1:
        message.ClearField(name)
    else:
        setattr(message, name, _value(field, rng))


def change_bytes(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    """The bytes of a request with something done to them that no protobuf library would do."""
    inner = [field for field in request_type.fields if field.message_type is not None]
    if inner and rng.random() < 0.3:
        field = rng.choice(inner)
        payload = change_bytes(rng.randbytes(rng.randrange(40)), field.message_type, rng)
        return data + length_delimited(field.number, payload)
    return rng.choice(_BYTE_CHANGES)(data, request_type, rng)


def _change_column(column: Any, field: FieldDescriptor, rng: random.Random) -> None:
    kind = rng.randrange(6)
    entries = list(column)
    if kind == 0:
        del column[:]
    elif kind == 1 and entries:
        column.pop()
    elif kind == 2 and entries:
        column.extend([rng.choice(entries)])
    elif kind == 3 and rng.random() < 0.1:
        column.extend([_entry(column, field, rng)] * rng.choice(_HUGE_COUNTS))
    elif kind == 4 and entries and field.message_type is None:
        column[rng.randrange(len(entries))] = _value(field, rng)
    else:
        column.extend([_entry(column, field, rng)])


def _entry(column: Any, field: FieldDescriptor, rng: random.Random) -> Any:
    if field.message_type is None:
        return _value(field, rng)
    entry = column.add()
    column.pop()
    return entry


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice(_LENGTHS))
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice((*_TEXTS, "y" * rng.choice(_LENGTHS)))
    return rng.choice(_BOUNDARIES[field.cpp_type])


def _truncated(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _inserted(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]


def _repeated_part(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[begin:]


def _twice(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    """Each field a second time: legal, and columns are twice as long."""
    return data + data


def _random(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 64))


def _wrong_wire_type(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    """A field that says that it is of another wire type, of those that do not exist too."""
    number = rng.choice([field.number for field in request_type.fields] or [1])
    payload = rng.choice((varint(2**64 - 1), struct.pack("<Q", 7), varint(3) + b"abc", b"abcd"))
    return data + tag(number, rng.randrange(8)) + payload


def _unknown_field(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    number = rng.choice((99, 1000, 2**29 - 1))
    return data + length_delimited(number, rng.randbytes(rng.randrange(20)))


def _length_beyond_the_end(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    number = rng.choice([field.number for field in request_type.fields] or [1])
    return data + tag(number, _BYTES) + varint(rng.choice((100, 2**31 - 1, 2**31, 2**63)))


def _endless_varint(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    return data + tag(rng.randint(1, 12), _VARINT) + b"\xff" * 11


def _deep_groups(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    return data + tag(rng.randint(1, 12), _GROUP_START) * rng.choice((1, 99, 101, 1000))


def _bad_text(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    """No UTF-8, in a field that is text if the message has one."""
    texts = [f.number for f in request_type.fields if f.type == FieldDescriptor.TYPE_STRING]
    return data + length_delimited(rng.choice(texts or [2]), b"\xff\xfe" + rng.randbytes(3))


def _torn_column(data: bytes, request_type: Descriptor, rng: random.Random) -> bytes:
    """Packed numbers whose bytes are not a whole number of them."""
    fixed = (FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_FIXED64)
    columns = [f.number for f in request_type.fields if f.is_repeated and f.type in fixed]
    return data + length_delimited(rng.choice(columns or [3]), rng.randbytes(rng.choice((3, 5))))


_BYTE_CHANGES: tuple[Callable[[bytes, Descriptor, random.Random], bytes], ...] = (
    _truncated,
    _flipped,
    _inserted,
    _repeated_part,
    _twice,
    _random,
    _wrong_wire_type,
    _unknown_field,
    _length_beyond_the_end,
    _endless_varint,
    _deep_groups,
    _bad_text,
    _torn_column,
)
