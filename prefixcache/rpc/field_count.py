"""How many fields a message on the wire has, counted before it is parsed.

Parsing makes an object of every entry of a repeated field. An empty one takes 2 bytes on the wire
and up to 130 in memory, so that a request far below the largest message could fill the memory and
keep all threads waiting: 16 MiB of empty items of a prompt took 1 GiB and 28 s. What is large for
good reason is one long column, or the bytes of a tensor: a step here, whatever its length.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_VARINT_TYPES = frozenset(
    {
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_ENUM,
    }
)


def has_more_fields(data: bytes, message: Any, limit: int) -> bool:
    """Whether it has more than `limit`, with those of the messages in it. message: its descriptor.

    A packed column of varints, which take more room in memory, counts once a byte. Raises
    ValueError for bytes that are no such message, or that hold a group.
    """
    # Fields take 2 bytes or more, but for packed varints; of so few nothing is large.
    if len(data) <= limit:
        return False
    try:
        return _count(data, message, limit) > limit
    except IndexError:
        raise ValueError("it ends within a field") from None


def _count(data: bytes, message: Any, limit: int) -> int:
    """Up to the first one above the limit."""
    num_fields, at, end = 0, 0, len(data)
    outer: list[tuple[int, Any]] = []
    while num_fields <= limit:
        if at == end:
            if not outer:
                break
            end, message = outer.pop()
            continue
        num_fields += 1
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LEN:
            length, at = _varint(data, at)
            field = message.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                if at + length > end:
                    raise ValueError("a message is longer than the one around it")
                outer.append((end, message))
                end, message = at + length, field.message_type
                continue
            if field is not None and field.type in _VARINT_TYPES:
                num_fields += length
            at += length
        elif kind in (_I64, _I32):
            at += 8 if kind == _I64 else 4
        else:
            raise ValueError("it holds a group")
        if at > end:
            raise ValueError("a field is longer than its message")
    return num_fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next byte is."""
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 10 bytes")
