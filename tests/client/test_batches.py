"""Batch calls report and move each row by itself; administration; what cannot be sent."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from prefixcache import errors
from prefixcache.errors import InvalidArgumentError, UnavailableError
from prefixcache.rpc._pb import admin_pb2, cache_pb2
from prefixcache.types import (
    AppendResult,
    AttentionOptions,
    BlockCopy,
    ExtraKeys,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    ResultCode,
    SequenceOrder,
)
from tests.client.fake_daemon import allocated


def _q(num_tokens: int) -> np.ndarray:
    return np.ones((num_tokens, 2, 8), dtype=np.float32)


def _three(client, fake):
    fake.will("Allocate", *[allocated(i, cached=i, blocks=(i, 10 + i)) for i in (1, 2, 3)])
    return [client.sequence(range(4 + i)) for i in (1, 2, 3)]


def test_a_batch_append_reports_each_row_and_moves_only_the_applied_ones(client, fake):
    sequences = _three(client, fake)
    fake.will(
        "Append",
        cache_pb2.AppendResponse(
            result_codes=[1, 5, 1],
            num_new_blocks=[2, 0, 1],
            new_block_ids=[20, 21, 22],
            num_copies=[0, 0, 1],
            copy_sources=[13],
            copy_destinations=[23],
        ),
    )
    keys = ExtraKeys(multimodal_items=(MultimodalItem("i", 7, 1),))
    results = client.append(
        sequences, [[1, 2], [3], np.array([4, 5])], [0, 0, 1], extra_keys=[None, None, keys]
    )
    assert results == [
        AppendResult(ResultCode.OK, (20, 21)),
        AppendResult(ResultCode.NO_ROOM),
        AppendResult(ResultCode.OK, (22,), (BlockCopy(13, 23),)),
    ]
    (request,) = fake.requests["Append"]
    assert list(request.start_positions) == [5, 6, 7]
    assert list(request.num_tokens) == [2, 1, 2]
    assert list(request.token_ids) == [1, 2, 3, 4, 5]
    assert list(request.num_kv_valid) == [0, 0, 1]
    assert list(request.num_lookahead_tokens) == []
    assert [entry.row for entry in request.extra_keys] == [2]
    assert [sequence.num_tokens for sequence in sequences] == [7, 6, 9]
    assert [sequence.block_ids.tolist() for sequence in sequences] == [
        [1, 11, 20, 21],
        [2, 12],
        [3, 23, 22],
    ]


def test_a_batch_commit_reports_each_row(client, fake):
    sequences = _three(client, fake)
    fake.will(
        "Commit", cache_pb2.CommitResponse(result_codes=[1, 4, 1], num_cached_blocks=[1, 0, 1])
    )
    results = client.commit(sequences, [3, 3, 3])
    assert [result.code for result in results] == [ResultCode.OK, ResultCode.BUSY, ResultCode.OK]
    fake.will("Commit", cache_pb2.CommitResponse(result_codes=[1] * 3, num_cached_blocks=[1] * 3))
    client.commit(sequences, np.array([1, 1, 1]))
    starts = [list(request.start_positions) for request in fake.requests["Commit"]]
    assert starts == [[1, 2, 3], [4, 2, 6]]


def test_a_batch_of_attention_has_a_row_a_sequence(client, fake):
    sequences = _three(client, fake)
    out = client.prefill(
        0, sequences, [4, 4, 4], _q(12), _q(12), _q(12), AttentionOptions(scale=0.25)
    )
    assert out.shape == (12, 2, 8)
    client.decode(0, sequences, _q(3), _q(3), _q(3))
    client.decode(0, sequences, _q(6), _q(6), _q(6), num_tokens=[1, 2, 3])
    prefill = fake.requests["Prefill"][0].batch
    assert list(prefill.sequence_ids) == [1, 2, 3]
    assert list(prefill.start_positions) == [1, 2, 3]
    assert prefill.scale == 0.25
    first, second = (request.batch for request in fake.requests["Decode"])
    assert (list(first.start_positions), list(first.num_tokens)) == ([5, 6, 7], [1, 1, 1])
    assert (list(second.start_positions), list(second.num_tokens)) == ([6, 7, 8], [1, 2, 3])


def test_a_batch_free_reports_each_row(client, fake):
    sequences = _three(client, fake)
    fake.will("Free", cache_pb2.FreeResponse(result_codes=[1, 2, 1]))
    codes = client.free(sequences)
    assert codes == [ResultCode.OK, ResultCode.NOT_FOUND, ResultCode.OK]
    assert all(sequence.is_freed for sequence in sequences)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("token_ids", lambda c, s: c.append(s, [[1]])),
        ("num_kv_valid", lambda c, s: c.append(s, [[1]] * 3, [1])),
        ("num_lookahead_tokens", lambda c, s: c.append(s, [[1]] * 3, None, [1, 2])),
        ("num_lookahead_tokens", lambda c, s: c.append(s, [[1]] * 3, None, [1, 2, -1])),
        ("extra_keys", lambda c, s: c.append(s, [[1]] * 3, extra_keys=[None])),
        ("num_computed_tokens", lambda c, s: c.commit(s, [1])),
        ("num_tokens", lambda c, s: c.prefill(0, s, [1], _q(1), _q(1), _q(1))),
        ("sequence_ids", lambda c, s: c.append([s[0], s[0]], [[1], [1]])),
        ("sequence_ids", lambda c, s: c.commit([s[0], s[0]], [1, 1])),
    ],
)
def test_columns_that_do_not_fit_the_sequences_are_refused_and_not_sent(client, fake, field, call):
    sequences = _three(client, fake)
    with pytest.raises(InvalidArgumentError) as caught:
        call(client, sequences)
    assert caught.value.field == field
    assert set(fake.requests) == {"GetServerInfo", "Allocate"}


@pytest.mark.parametrize(
    "keys",
    [
        ExtraKeys(multimodal_items=(MultimodalItem("i", -1, 1),)),
        ExtraKeys(multimodal_items=(MultimodalItem("i", 0, 2**32),)),
        ExtraKeys(cache_salt="\ud800"),
        ExtraKeys(lora=Lora(b"bytes\xff")),
        ExtraKeys(prompt_embeds=(PromptEmbeds(0, 1, ("text",)),)),
    ],
)
def test_extra_keys_that_cannot_be_sent_are_refused(client, fake, keys):
    for call in (client.lookup, client.sequence):
        with pytest.raises(InvalidArgumentError) as caught:
            call([1, 2, 3], extra_keys=keys)
        assert caught.value.field == "extra_keys"
    assert set(fake.requests) <= {"GetServerInfo"}


# ---- administration


def test_all_pages_of_sequences_are_read(client, fake):
    info = admin_pb2.SequenceInfo(sequence_id=2**64 - 1, owner_digest="ab", num_tokens=5, age_s=1.5)
    fake.will(
        "ListSequences",
        admin_pb2.ListSequencesResponse(sequences=[info] * 2, next_page_token="2"),
        admin_pb2.ListSequencesResponse(sequences=[info]),
    )
    listed = client.list_sequences()
    assert len(listed) == 3
    assert (listed[0].sequence_id, listed[0].owner_digest) == (2**64 - 1, "ab")
    assert [request.page_token for request in fake.requests["ListSequences"]] == ["", "2"]


def test_the_first_sequences_of_an_order_are_one_page(client, fake):
    info = admin_pb2.SequenceInfo(sequence_id=7, num_blocks=3)
    fake.will("ListSequences", admin_pb2.ListSequencesResponse(sequences=[info]))
    (found,) = client.first_sequences(SequenceOrder.MOST_BLOCKS, 5)
    assert (found.sequence_id, found.num_blocks) == (7, 3)
    (request,) = fake.requests["ListSequences"]
    assert (request.order, request.page_size) == (admin_pb2.SEQUENCE_ORDER_MOST_BLOCKS, 5)


def test_a_page_that_fails_fails_the_list(client, fake):
    fake.will("ListSequences", grpc.StatusCode.UNAVAILABLE, *[grpc.StatusCode.UNAVAILABLE] * 3)
    with pytest.raises(UnavailableError):
        client.list_sequences()


def test_reset_says_how_many_hashes_there_were(client, fake):
    fake.will("ResetCache", admin_pb2.ResetCacheResponse(num_dropped=3), errors.BlocksInUseError(4))
    assert client.reset_cache(force=True) == 3
    with pytest.raises(errors.BlocksInUseError):
        client.reset_cache()
    assert [request.force for request in fake.requests["ResetCache"]] == [True, False]
