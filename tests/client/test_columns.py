"""Tokens and counts: what is taken, what is refused, and the bytes that go out."""

from __future__ import annotations

import array

import numpy as np
import pytest
import torch

from prefixcache.client.columns import uint32, uint32_column, uint32_rows
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import cache_pb2

UINT32_MAX = 2**32 - 1
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize(
    "values",
    [
        EDGES,
        tuple(EDGES),
        array.array("I", EDGES),
        np.array(EDGES, dtype=np.uint32),
        np.array(EDGES, dtype=np.int64),
        np.array(EDGES, dtype=">u4"),
        np.array(EDGES * 2, dtype=np.uint64)[:5],
        np.repeat(np.array(EDGES, dtype=np.int64), 2)[::2],
        torch.tensor(EDGES),
        [np.int64(value) for value in EDGES],
        [np.uint32(value) for value in EDGES],
    ],
    ids=lambda values: f"{type(values).__name__}-{getattr(values, 'dtype', '')}",
)
def test_any_column_of_uint32_is_taken(values):
    column = uint32_column(values, "token_ids")
    assert column.dtype == np.uint32
    assert column.tolist() == EDGES


@pytest.mark.parametrize("empty", [[], (), range(0), np.empty(0, np.int32), torch.empty(0).int()])
def test_an_empty_column_is_taken(empty):
    assert len(uint32_column(empty, "token_ids")) == 0


@pytest.mark.parametrize(
    "values",
    [
        [-1],
        [2**32],
        [2**80],
        [1, 2, -3],
        np.array([-1]),
        np.array([2**32]),
        np.array([2**63], dtype=np.uint64),
        torch.tensor([-1]),
        torch.tensor([2**40]),
        [1.0],
        ["1"],
        [None],
        [[1, 2]],
        [[1], [2, 3]],
        "123",
        b"123",
        None,
        5,
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(["1"]),
        np.array([1, 2], dtype=object),
        torch.tensor([1.5]),
        torch.tensor([True]),
        torch.tensor([[1]]),
    ],
    ids=repr,
)
def test_what_is_no_column_of_uint32_is_refused_and_the_field_named(values):
    with pytest.raises(InvalidArgumentError) as caught:
        uint32_column(values, "token_ids")
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[]],
        [[], [1], [], [2, 3], []],
        [(1, 2), range(5), [UINT32_MAX]],
        [np.arange(3), [7], torch.tensor([8, 9]), ()],
        [np.arange(3), np.array([UINT32_MAX]), np.empty(0, np.int64)],
        [np.array([5], dtype=np.int64), np.array([UINT32_MAX], dtype=np.uint64)],
        np.arange(6).reshape(3, 2),
        torch.arange(4).reshape(4, 1),
    ],
    ids=lambda rows: f"{type(rows).__name__}-{len(rows)}",
)
def test_rows_become_one_column_and_their_lengths(rows):
    column, lengths = uint32_rows(rows, "token_ids")
    assert column.dtype == np.uint32
    assert column.tolist() == [int(value) for row in rows for value in row]
    assert lengths == [len(row) for row in rows]


@pytest.mark.parametrize("bad", [-1, 2**32, 1.0, "1", None, [1]])
@pytest.mark.parametrize("row", [list, tuple, lambda values: np.array(values, dtype=object)])
def test_a_bad_value_in_any_row_is_refused(row, bad):
    with pytest.raises(InvalidArgumentError) as caught:
        uint32_rows([[1, 2], row([3, bad]), [4]], "token_ids")
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    "row", ["12", b"12", 5, None, [[1], [2]], np.array(5), np.array([[1], [2]]), np.array([1.0])]
)
def test_a_row_that_is_no_column_is_refused(row):
    for rows in ([[1, 2], row], [row], [row, row], [np.array([[1, 2, 3]]), row]):
        with pytest.raises(InvalidArgumentError):
            uint32_rows(rows, "token_ids")


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_a_bad_value_in_arrays_of_one_dtype_is_refused(dtype):
    bad = np.array([2**32 if dtype is np.uint64 else -1], dtype=dtype)
    with pytest.raises(InvalidArgumentError, match="not in the range"):
        uint32_rows([np.array([3], dtype=dtype), bad], "token_ids")


def test_the_bad_value_and_the_limit_are_named():
    with pytest.raises(InvalidArgumentError, match="-7 is not in the range 0 to 4294967295"):
        uint32_column([3, -7, 5], "token_ids")
    with pytest.raises(InvalidArgumentError, match="num_lookahead_tokens: -1"):
        uint32(-1, "num_lookahead_tokens")


@pytest.mark.parametrize("num_tokens", [1, 16, 131_072])
@pytest.mark.parametrize(
    "make", [np.ndarray.tolist, np.copy, lambda t: torch.from_numpy(t.astype("i8"))]
)
def test_a_request_has_the_fields_of_the_declared_message_and_as_many_bytes(
    client, fake, num_tokens, make
):
    tokens = np.random.default_rng(num_tokens).integers(0, 2**32, num_tokens, dtype=np.uint32)
    fake.will("Allocate", cache_pb2.AllocateResponse(sequence_id=7, block_ids=[1]))
    client.lookup(make(tokens))
    sequence = client.sequence(make(tokens), request_id="r")
    fake.will(
        "Append", cache_pb2.AppendResponse(result_codes=[1], num_new_blocks=[0], num_copies=[0])
    )
    sequence.append(make(tokens))

    ids = tokens.tolist()
    (owner,) = {request.owner for request in fake.requests["Allocate"]}
    fingerprint = fake.requests["Allocate"][0].layout_fingerprint
    lookup = cache_pb2.LookupRequest(token_ids=ids, full_hit=1)
    allocate = cache_pb2.AllocateRequest(
        owner=owner,
        request_id="r",
        token_ids=ids,
        cache_use=1,
        full_hit=1,
        layout_fingerprint=fingerprint,
    )
    append = cache_pb2.AppendRequest(
        owner=owner,
        sequence_ids=[7],
        start_positions=[num_tokens],
        num_tokens=[num_tokens],
        token_ids=ids,
    )
    for name, message in (("Lookup", lookup), ("Allocate", allocate), ("Append", append)):
        (raw,) = fake.raw[name]
        assert type(message).FromString(raw) == message, name
        assert len(raw) == message.ByteSize(), name


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.lookup([-1]),
        lambda client: client.sequence([2**32]),
        lambda client: client.lookup([1], num_lookahead_tokens=-1),
        lambda client: client.sequence([1], num_lookahead_tokens=2**32),
    ],
)
def test_a_refused_argument_is_not_sent(client, fake, call):
    client.server_info()
    with pytest.raises(InvalidArgumentError):
        call(client)
    assert set(fake.requests) == {"GetServerInfo"}
