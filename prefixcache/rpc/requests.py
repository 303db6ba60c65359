"""Requests as the daemon reads them: plain messages, twins, and what neither reads right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from prefixcache.rpc.plain import plain
from prefixcache.rpc.wire import COLUMN_WIDTHS, Method, twin


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a message has columns: its own, by name and width, and messages with columns in them.

    parts: by name and whether there are many.
    """

    own: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, bool, _Columns], ...]

    @classmethod
    def of(cls, declared: Any) -> _Columns:
        """declared: the descriptor of a message."""
        own, parts = [], []
        for field in declared.fields:
            if field.type in COLUMN_WIDTHS and field.is_repeated:
                own.append((field.name, COLUMN_WIDTHS[field.type]))
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                columns = cls.of(field.message_type)
                if columns.own or columns.parts:
                    parts.append((field.name, field.is_repeated, columns))
        return cls(tuple(own), tuple(parts))

    def may_be_elsewhere(self, message: Message) -> bool:
        """Whether a twin has unknown fields, which may be elements, or a column that is none."""
        if len(UnknownFieldSet(message)):
            return True
        if any(len(getattr(message, name)) % width for name, width in self.own):
            return True
        for name, are_many, columns in self.parts:
            parts = getattr(message, name)
            if any(map(columns.may_be_elsewhere, parts if are_many else (parts,))):
                return True
        return False


class RequestReader:
    """Reads the requests of one RPC, with columns in every legal spelling."""

    def __init__(self, method: Method) -> None:
        self._declared = method.request
        self._twin = twin(method.request.DESCRIPTOR.name)
        self._columns = _Columns.of(method.request.DESCRIPTOR)
        message = plain(method.request.DESCRIPTOR)
        self._read_plain = None if message is None else message.codec.read

    def read(self, data: bytes) -> Any:
        """A plain message, or a twin. Raises DecodeError.

        A twin keeps the last piece of a column only, and elements of their own are unknown fields.
        If it holds all bytes, and as fields that it knows, there was neither. Otherwise the
        declared message reads them, and what that writes is read again.
        """
        if self._read_plain is not None:
            message = self._read_plain(data)
            if message is not None:
                return message
        request = self._twin.FromString(data)
        if request.ByteSize() == len(data) and not self._columns.may_be_elsewhere(request):
            return request
        return self._twin.FromString(self._declared.FromString(data).SerializeToString())
