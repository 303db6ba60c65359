"""Which messages compiled code reads by itself, and that it reads them as protobuf does."""

from __future__ import annotations

import random

import pytest

from prefixcache.rpc import wire
from prefixcache.rpc.plain import PlainMessage
from prefixcache.rpc.requests import RequestReader
from tests.rpc.test_plain import METHODS, OF_A_STEP, filled, values, without_plain


def plain_fields(name: str) -> list[str]:
    """Without repeated messages and texts, and without the items of a prompt."""
    columns = wire.COLUMN_WIDTHS
    return [
        field.name
        for field in METHODS[name].request.DESCRIPTOR.fields
        if field.name != "extra_keys" and not (field.is_repeated and field.type not in columns)
    ]


@pytest.mark.parametrize("name", OF_A_STEP)
def test_the_messages_of_a_step_are_plain_and_read_as_twins_are(name: str) -> None:
    rng, fields = random.Random(name), plain_fields(name)
    for count in range(len(fields) + 1):
        data = filled(name, rng, rng.sample(fields, count)).SerializeToString()
        request = RequestReader(METHODS[name]).read(data)
        assert isinstance(request, PlainMessage)
        expected = without_plain(name).read(data)
        assert not isinstance(expected, PlainMessage)
        declared = METHODS[name].request.DESCRIPTOR
        assert values(request, declared) == values(expected, declared)


@pytest.mark.parametrize("name", ["Lookup", "Allocate"])
def test_a_prompt_with_an_adapter_is_plain_and_one_with_an_image_is_not(name: str) -> None:
    request = METHODS[name].request(token_ids=[1, 2])
    request.extra_keys.lora.name, request.extra_keys.cache_salt = "de", "s"
    read = RequestReader(METHODS[name]).read
    assert isinstance(found := read(request.SerializeToString()), PlainMessage)
    assert (found.extra_keys.lora.name, found.extra_keys.lora.path) == ("de", "")
    assert found.HasField("extra_keys") and found.extra_keys.cache_salt == "s"
    request.extra_keys.multimodal_items.add(identifier="A")
    assert not isinstance(read(request.SerializeToString()), PlainMessage)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x02ab\x0a\x02cd",  # a field twice
        b"\x0a\x03ab",  # longer than the message
        b"\x7a\x01a",  # no such field
        b"\x82\x01\x01a",  # a tag of two bytes
        b"\x0d\x01\x00\x00\x00",  # the owner as a number
        b"\x15\x01\x00\x00\x00",  # a column that is not packed
        b"\x12\x03abc",  # half an element
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 2^64 - 1
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x03",  # one of more than 64 bits
        b"\x2a\x02\x08",  # the end in a message
        b"\x0a",
    ],
)
def test_what_is_not_plain_is_left_to_protobuf(data: bytes) -> None:
    codec = RequestReader(METHODS["Commit"])._read_plain
    assert codec is not None
    assert codec(data) is None


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x28\xff\xff\xff\xff\x0f", 2**32 - 1),
        (b"\x28\xff\xff\xff\xff\x1f", None),
        (b"\x28\x81\x80\x00", 1),
    ],
)
def test_numbers_that_fit_are_plain(data: bytes, expected: int | None) -> None:
    codec = RequestReader(METHODS["Allocate"])._read_plain
    assert codec is not None
    found = codec(data)
    assert (None if found is None else found.num_lookahead_tokens) == expected
