"""Plain messages: read and written at once by compiled code, where that was built.

Protobuf's parser is fast, but each field costs a call to read and a check by itself, and its code
is cold when a call comes. A message is *plain* if each of its fields stands in it at most once, is
a number, text, bytes or a column, or a plain message, and nothing else is there: so are the
messages of an engine's every step. A `PlainMessage` looks like the twin of its message. Whatever
is not plain is read as a twin.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from prefixcache.core.form import is_compiled
from prefixcache.rpc.wire import COLUMN_WIDTHS, twin

_IS_BUILT = is_compiled("prefixcache.rpc.native.plain_codec")
if _IS_BUILT:
    from prefixcache.rpc.native.plain_codec import NUM_FIELDS, PlainCodec

_KINDS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "int32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_MESSAGE: "message",
}
"""Of the fields that a plain message may have."""


class PlainMessage:
    """Fields as attributes; those that are not there have their defaults from the class."""

    codec: PlainCodec

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    def HasField(self, name: str) -> bool:
        return name in self.__dict__

    def SerializeToString(self) -> bytes:
        """The bytes of a message that has no text and no message in it."""
        return self.codec.write(self.__dict__)


def plain(message: Any) -> type[PlainMessage] | None:
    """The class of a message's plain form; None where no compiled code reads it.

    message: the descriptor of the declared one.
    """
    if not _IS_BUILT:
        return None
    defaults = {field.name: _default(field) for field in message.fields}
    found: type[PlainMessage] = type(message.name, (PlainMessage,), defaults)
    found.codec = PlainCodec(
        found,
        [
            (field.number, field.name, kind, _codec_of(field))
            for field in message.fields
            if field.number < NUM_FIELDS and (kind := _kind(field)) is not None
        ],
    )
    return found


def plain_reply(message: type[Message]) -> Any:
    """What makes replies, without text and messages in them, of keyword arguments."""
    return plain(message.DESCRIPTOR) or twin(message.DESCRIPTOR.name)


def _codec_of(field: FieldDescriptor) -> PlainCodec | None:
    message = plain(field.message_type) if field.message_type is not None else None
    return None if message is None else message.codec


def _kind(field: FieldDescriptor) -> str | None:
    if field.is_repeated:
        width = COLUMN_WIDTHS.get(field.type)
        return f"column{8 * width}" if width is not None else None
    # A number or a text that may be there and 0 or empty is not plain.
    if field.has_presence and field.message_type is None:
        return None
    return _KINDS.get(field.type)


def _default(field: FieldDescriptor) -> Any:
    if field.is_repeated:
        return b"" if field.type in COLUMN_WIDTHS else ()
    if field.message_type is not None:
        return twin(field.message_type.name)()
    return field.default_value
