"""Plain messages are read and written as protobuf does it, or left to protobuf."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from prefixcache.rpc import wire
from prefixcache.rpc._pb import cache_pb2
from prefixcache.rpc.plain import plain_reply
from prefixcache.rpc.requests import RequestReader
from tests.rpc.test_wire import fill

METHODS = {method.name: method for method in wire.methods()}
OF_A_STEP = ("Lookup", "Allocate", "Append", "Commit", "Free", "Truncate")
REPLIES = (
    cache_pb2.AllocateResponse,
    cache_pb2.AppendResponse,
    cache_pb2.CommitResponse,
    cache_pb2.FreeResponse,
)


def filled(name: str, rng: random.Random, fields: list[str] | None = None) -> Any:
    """A request with random values in some of its fields; None for all of them."""
    request = METHODS[name].request()
    fill(request, wire.twin(request.DESCRIPTOR.name)(), rng)
    for field in request.DESCRIPTOR.fields:
        if fields is not None and field.name not in fields:
            request.ClearField(field.name)
    return request


def values(message: Any, descriptor: Any) -> dict[str, Any]:
    """All fields of a plain message or a twin, and which messages are there; NaN equals NaN."""
    found: dict[str, Any] = {}
    for field in descriptor.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and not field.is_repeated:
            found["has " + field.name] = message.HasField(field.name)
            value = values(value, field.message_type)
        elif field.message_type is not None:
            value = [values(part, field.message_type) for part in value]
        elif field.is_repeated and field.type not in wire.COLUMN_WIDTHS:
            value = repr(list(value))
        found[field.name] = repr(value) if isinstance(value, float) else value
    return found


def without_plain(name: str) -> RequestReader:
    reader = RequestReader(METHODS[name])
    reader._read_plain = None
    return reader


def drop(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randrange(4) :]


def change(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return (
        data[:at]
        + bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])])
        + data[at + 1 :]
    )


def put(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 12)) + data[at:]


def twice(data: bytes, rng: random.Random) -> bytes:
    return data + data[rng.randrange(len(data)) :]


@pytest.mark.parametrize("mutate", [drop, change, put, twice])
@pytest.mark.parametrize("name", [*OF_A_STEP, "Fork", "Step", "Prefill", "OpenSession"])
def test_any_bytes_are_read_or_refused_as_without_plain_messages(
    name: str, mutate: Callable[[bytes, random.Random], bytes]
) -> None:
    rng, declared = random.Random(f"{name} {mutate.__name__}"), METHODS[name].request.DESCRIPTOR
    readers = RequestReader(METHODS[name]), without_plain(name)
    names = [field.name for field in declared.fields]
    outcomes: set[str] = set()
    for _ in range(400):
        fields = rng.sample(names, rng.randrange(1, len(names) + 1))
        data = mutate(filled(name, rng, fields).SerializeToString(), rng)
        found: list[Any] = []
        for reader in readers:
            try:
                found.append(values(reader.read(data), declared))
            except DecodeError:
                found.append(DecodeError)
        assert found[0] == found[1], data
        outcomes.add("refused" if found[0] is DecodeError else "read")
    assert outcomes == {"read", "refused"} or mutate is twice


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: message.DESCRIPTOR.name)
def test_replies_have_the_bytes_of_their_twins(message: Any) -> None:
    rng = random.Random(message.DESCRIPTOR.name)
    twin = wire.twin(message.DESCRIPTOR.name)
    for _ in range(50):
        filled = twin()
        fill(message(), filled, rng)
        fields = {field.name: value for field, value in filled.ListFields()}
        for name in rng.sample(sorted(fields), rng.randrange(len(fields) + 1)):
            fields[name] = rng.choice([type(fields[name])(), fields[name]])
        reply = plain_reply(message)(**fields)
        assert reply.SerializeToString() == twin(**fields).SerializeToString(deterministic=True)
        for name, value in fields.items():
            assert getattr(reply, name) == value


def test_a_reply_with_a_field_that_there_is_not_is_a_bug() -> None:
    with pytest.raises((TypeError, ValueError)):
        plain_reply(cache_pb2.FreeResponse)(result_code=b"1234").SerializeToString()


@pytest.mark.parametrize("value", [-1, 2**32, 2**64])
def test_a_reply_with_a_number_out_of_range_is_a_bug(value: int) -> None:
    with pytest.raises((OverflowError, ValueError)):
        plain_reply(cache_pb2.AllocateResponse)(num_cached_tokens=value).SerializeToString()
