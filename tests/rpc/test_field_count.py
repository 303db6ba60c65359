"""Fields of a message, counted before it is parsed: as many as the parser finds."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from prefixcache.rpc._pb import attention_pb2, cache_pb2
from prefixcache.rpc.field_count import has_more_fields

ITEM = cache_pb2.MultimodalItem(identifier="a", offset=1, num_tokens=3)
LOOKUP = cache_pb2.LookupRequest(
    token_ids=range(1000),
    extra_keys=cache_pb2.ExtraKeys(multimodal_items=[ITEM, ITEM], cache_salt="pepper"),
    num_lookahead_tokens=300,
)
NUM_FIELDS = 1 + 1 + 2 * (1 + 3) + 1 + 1
EMPTY_ITEMS = cache_pb2.ExtraKeys(multimodal_items=[cache_pb2.MultimodalItem()] * 500)
GROUP = bytes([15 << 3 | 3, 15 << 3 | 4])


def has_more(message: Any, limit: int) -> bool:
    return has_more_fields(message.SerializeToString(), type(message).DESCRIPTOR, limit)


def test_the_fields_of_messages_within_count_and_a_packed_column_is_one() -> None:
    assert has_more(LOOKUP, NUM_FIELDS - 1)
    assert not has_more(LOOKUP, NUM_FIELDS)


@pytest.mark.parametrize(
    ("message", "num_fields"),
    [
        (cache_pb2.LookupRequest(extra_keys=EMPTY_ITEMS), 501),
        (cache_pb2.StepRequest(allocates=[cache_pb2.AllocateRequest()] * 500), 500),
        (cache_pb2.FreeRequest(owner=bytes(16), request_ids=["a"] * 500), 501),
        (attention_pb2.Tensor(shape=[1] * 500, data=bytes(5000)), 502),
    ],
)
def test_entries_count_where_they_take_more_room_in_memory(message: Any, num_fields: int) -> None:
    assert has_more(message, num_fields - 1)
    assert not has_more(message, num_fields)


def test_elements_of_a_column_that_is_not_packed_count() -> None:
    data = b"".join(b"\x0d" + bytes([token, 0, 0, 0]) for token in range(100))
    assert len(cache_pb2.LookupRequest.FromString(data).token_ids) == 100
    assert has_more_fields(data, cache_pb2.LookupRequest.DESCRIPTOR, 99)
    assert not has_more_fields(data, cache_pb2.LookupRequest.DESCRIPTOR, 100)


def test_fields_that_nobody_knows_count() -> None:
    data = b"\xf8\xff\x07\x00" * 100
    assert has_more_fields(data, cache_pb2.LookupRequest.DESCRIPTOR, 99)
    assert not has_more_fields(data, cache_pb2.LookupRequest.DESCRIPTOR, 100)


@pytest.mark.parametrize("cut", [1, 2, 500])
def test_bytes_that_end_within_a_field_are_no_message(cut: int) -> None:
    data = LOOKUP.SerializeToString()[:-cut]
    with pytest.raises(DecodeError):
        cache_pb2.LookupRequest.FromString(data)
    with pytest.raises(ValueError, match=r"field|message"):
        has_more_fields(data, cache_pb2.LookupRequest.DESCRIPTOR, 30)


def test_a_message_is_not_longer_than_the_one_around_it() -> None:
    """Its rest would hide fields from the count."""
    data = b"\x12\x02\x12\x7f" + bytes(200)
    with pytest.raises(DecodeError):
        cache_pb2.LookupRequest.FromString(data)
    with pytest.raises(ValueError, match="longer than"):
        has_more_fields(data, cache_pb2.LookupRequest.DESCRIPTOR, 10)


def test_groups_and_endless_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="group"):
        has_more_fields(GROUP * 10, cache_pb2.LookupRequest.DESCRIPTOR, 10)
    with pytest.raises(ValueError, match="10 bytes"):
        has_more_fields(b"\xff" * 20, cache_pb2.LookupRequest.DESCRIPTOR, 10)


def test_few_bytes_are_not_looked_at() -> None:
    assert not has_more_fields(b"\xff" * 10, cache_pb2.LookupRequest.DESCRIPTOR, 10)
