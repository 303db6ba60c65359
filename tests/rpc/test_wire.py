"""Twins: the same bytes as the declared messages, both ways."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2
from prefixcache.types import ResultCode

DECLARED = {
    name: getattr(module, name)
    for module in (cache_pb2, attention_pb2, admin_pb2)
    for name in module.DESCRIPTOR.message_types_by_name
}
COLUMNS = {
    FieldDescriptor.TYPE_FIXED32: (wire.column32, wire.read_column32, 32),
    FieldDescriptor.TYPE_FIXED64: (wire.column64, wire.read_column64, 64),
}


def _is_column(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.type in COLUMNS


def fill(message: Message, twin: Message, rng: random.Random) -> None:
    """The same random values in both: columns as lists here and as bytes there."""
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if _is_column(field):
            to_bytes, _, bits = COLUMNS[field.type]
            values = [rng.choice([0, 1, 2**bits - 1, rng.getrandbits(bits)]) for _ in range(9)]
            getattr(message, name).extend(values)
            setattr(twin, name, to_bytes(values))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for _ in range(2 if field.is_repeated else 1):
                if field.is_repeated:
                    fill(getattr(message, name).add(), getattr(twin, name).add(), rng)
                else:
                    fill(getattr(message, name), getattr(twin, name), rng)
        else:
            value = _scalar(field, rng)
            if field.is_repeated:
                getattr(message, name).extend([value] * 2)
                getattr(twin, name).extend([value] * 2)
            else:
                setattr(message, name, value)
                setattr(twin, name, value)


def _scalar(field: FieldDescriptor, rng: random.Random):
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"text {rng.random()}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(16)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return float(rng.randrange(1, 1000))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type == FieldDescriptor.TYPE_ENUM:
        return 1
    return rng.randrange(1, 2**32)


@pytest.mark.parametrize("name", DECLARED)
def test_a_twin_has_the_bytes_of_the_declared_message(name):
    message, twin = DECLARED[name](), wire.twin(name)()
    fill(message, twin, random.Random(name))
    data = message.SerializeToString(deterministic=True)
    assert twin.SerializeToString(deterministic=True) == data
    assert DECLARED[name].FromString(twin.SerializeToString()) == message


@pytest.mark.parametrize("name", DECLARED)
def test_a_twin_reads_the_bytes_of_the_declared_message(name):
    message, filled = DECLARED[name](), wire.twin(name)()
    fill(message, filled, random.Random(name))
    twin = wire.twin(name).FromString(message.SerializeToString())
    assert twin == filled
    for field in message.DESCRIPTOR.fields:
        if _is_column(field):
            _, from_bytes, _ = COLUMNS[field.type]
            column = from_bytes(getattr(twin, field.name))
            assert column.tolist() == list(getattr(message, field.name))


@pytest.mark.parametrize("name", DECLARED)
def test_an_empty_twin_is_an_empty_message(name):
    assert wire.twin(name)().SerializeToString() == b""


def test_every_column_has_bytes_in_its_twin_and_nothing_else_has():
    for name, declared in DECLARED.items():
        for field in declared.DESCRIPTOR.fields:
            twin = wire.twin(name).DESCRIPTOR.fields_by_name[field.name]
            assert twin.number == field.number
            if _is_column(field):
                assert (twin.type, twin.is_repeated) == (FieldDescriptor.TYPE_BYTES, False)
            else:
                assert (twin.type, twin.is_repeated) == (field.type, field.is_repeated)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0],
        [2**32 - 1, 1],
        (3, 4),
        [ResultCode.OK],
        np.arange(5),
        np.arange(5)[::2],
        array("I"),
        array("I", [2**32 - 1, 1]),
    ],
    ids=repr,
)
def test_columns_are_little_endian(values):
    data = wire.column32(values)
    assert data == b"".join(int(value).to_bytes(4, "little") for value in values)
    assert wire.read_column32(data).tolist() == list(values)
    wide = wire.column64(values)
    assert wide == b"".join(int(value).to_bytes(8, "little") for value in values)
    assert wire.read_column64(wide).tolist() == list(values)


def test_methods_name_every_rpc_with_its_messages():
    found = {method.path: method for method in wire.methods()}
    assert len(found) == 20
    assert [path for path, method in found.items() if method.is_stream] == [
        "/prefixcache.v1.PrefixCacheService/Step",
        "/prefixcache.v1.SessionService/KeepAlive",
        "/prefixcache.v1.AdminService/WatchEvents",
    ]
    assert [method.name for method in found.values() if method.is_watch] == ["WatchEvents"]
    lookup = found["/prefixcache.v1.PrefixCacheService/Lookup"]
    assert lookup.request is cache_pb2.LookupRequest
    assert lookup.response is cache_pb2.LookupResponse
    assert wire.service_names() == [
        "prefixcache.v1.AdminService",
        "prefixcache.v1.AttentionService",
        "prefixcache.v1.PrefixCacheService",
        "prefixcache.v1.SessionService",
    ]


@pytest.mark.parametrize("width", [1, 16, 32, 127])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_repeated_bytes_merge_to_the_field_with_those_entries(count, width):
    entries = [bytes([number]) * width for number in range(count)]
    number = cache_pb2.LookupResponse.BLOCK_HASHES_FIELD_NUMBER
    merged = cache_pb2.LookupResponse(num_cached_blocks=7)
    merged.MergeFromString(wire.repeated_bytes(number, b"".join(entries), width))
    assert merged == cache_pb2.LookupResponse(num_cached_blocks=7, block_hashes=entries)
