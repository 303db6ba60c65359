"""A sequence knows where it stands: requests carry it, replies move it, refusals do not."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from prefixcache import errors
from prefixcache.client.row_errors import ROW_ERRORS
from prefixcache.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NoRoomError,
    SequenceNotFoundError,
)
from prefixcache.rpc._pb import cache_pb2
from prefixcache.types import (
    AppendResult,
    BlockCopy,
    CacheUse,
    CommitResult,
    ExtraKeys,
    FullHit,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    ResultCode,
)
from tests.client.fake_daemon import allocated, info_reply
from tests.client.twins import open_client


def _q(num_tokens: int) -> np.ndarray:
    return np.ones((num_tokens, 2, 8), dtype=np.float32)


def _appended(code: int = 1, new: tuple[int, ...] = (), copy: tuple[int, int] | None = None):
    return cache_pb2.AppendResponse(
        result_codes=[code],
        num_new_blocks=[len(new)],
        new_block_ids=new,
        num_copies=[1 if copy else 0],
        copy_sources=[copy[0]] if copy else [],
        copy_destinations=[copy[1]] if copy else [],
        num_blocks_free=3,
    )


@pytest.fixture
def sequence(client, fake):
    """10 tokens in blocks of 4, the first 8 of them cached, and a block of lookahead."""
    fake.will("Allocate", allocated(2**63 + 1, cached=8, blocks=(5, 6, 7, 8)))
    return client.sequence(range(10), num_lookahead_tokens=6)


# ---- life


def test_a_sequence_is_what_the_daemon_allocated(client, fake, sequence):
    assert sequence.sequence_id == 2**63 + 1
    assert (sequence.num_tokens, sequence.num_cached_tokens) == (10, 8)
    assert sequence.num_computed_tokens == 8
    assert sequence.block_ids.tolist() == [5, 6, 7, 8]
    assert sequence.block_ids.dtype == np.int32
    assert not sequence.is_freed
    (request,) = fake.requests["Allocate"]
    assert len(request.owner) == 16
    assert len(request.request_id) == 32
    assert request.num_lookahead_tokens == 6
    assert request.layout_fingerprint == bytes(range(32))


def test_arguments_of_a_sequence_reach_the_daemon(client, fake):
    keys = ExtraKeys(
        lora=Lora("a", "/a"),
        multimodal_items=(MultimodalItem("image", 1, 2),),
        cache_salt="salt",
        prompt_embeds=(PromptEmbeds(0, 4, (b"d" * 32,)),),
    )
    client.sequence(
        [1, 2, 3],
        extra_keys=keys,
        cache_use=CacheUse.NO_WRITE,
        full_hit=FullHit.LAST_BLOCK,
        resumed=True,
        request_id="mine",
    )
    (request,) = fake.requests["Allocate"]
    assert (request.cache_use, request.full_hit, request.resumed) == (3, 2, True)
    assert request.request_id == "mine"
    assert request.extra_keys.lora == cache_pb2.Lora(name="a", path="/a")
    assert request.extra_keys.multimodal_items[0].offset == 1
    assert request.extra_keys.cache_salt == "salt"
    assert request.extra_keys.prompt_embeds[0].digests == [b"d" * 32]


def test_clients_are_different_owners_and_requests_have_different_names(client_kind, fake):
    for _ in range(2):
        with open_client(client_kind, fake.target, session_ttl_s=None) as client:
            client.sequence([1])
            client.sequence([1])
    owners = [request.owner for request in fake.requests["Allocate"]]
    assert owners[0] == owners[1] != owners[2] == owners[3]
    assert len({request.request_id for request in fake.requests["Allocate"]}) == 4


def test_the_end_of_the_block_frees_the_sequence(fake, sequence):
    with sequence as same:
        assert same.sequence_id == sequence.sequence_id
        assert not fake.requests["Free"]
    assert list(fake.requests["Free"][0].sequence_ids) == [2**63 + 1]
    assert sequence.is_freed


def test_an_error_in_the_block_frees_the_sequence_and_comes_through(fake, sequence):
    with pytest.raises(ZeroDivisionError), sequence:
        raise ZeroDivisionError
    assert len(fake.requests["Free"]) == 1


def test_a_free_that_fails_does_not_hide_the_error_of_the_block(fake, sequence):
    fake.will("Free", errors.InternalError("broken"))
    with pytest.raises(ZeroDivisionError) as caught, sequence:
        raise ZeroDivisionError
    assert caught.value.__notes__ == ["and the sequence could not be freed: broken"]


def test_a_free_that_fails_is_raised_after_a_block_without_error(fake, sequence):
    fake.will("Free", errors.InternalError("broken"))
    with pytest.raises(InternalError, match="broken"), sequence:
        pass
    assert not sequence.is_freed
    sequence.free()
    assert sequence.is_freed


def test_a_sequence_that_the_daemon_does_not_know_any_more_is_freed(fake, sequence):
    fake.will("Free", cache_pb2.FreeResponse(result_codes=[2]))
    with sequence:
        pass
    assert sequence.is_freed


def test_a_sequence_is_freed_once(client, fake, sequence):
    with sequence:
        assert client.free([sequence]) == [ResultCode.OK]
    sequence.free()
    assert len(fake.requests["Free"]) == 1


# ---- positions


def test_each_layer_goes_on_where_it_stands(fake, sequence):
    sequence.prefill(0, _q(1), _q(1), _q(1))
    sequence.prefill(0, _q(1), _q(1), _q(1))
    sequence.prefill(1, _q(2), _q(2), _q(2))
    sequence.decode(0, _q(1), _q(1), _q(1))
    batches = [request.batch for request in fake.requests["Prefill"]]
    assert [(b.layer, *b.start_positions, *b.num_tokens) for b in batches] == [
        (0, 8, 1),
        (0, 9, 1),
        (1, 8, 2),
    ]
    batch = fake.requests["Decode"][0].batch
    assert (batch.layer, *batch.start_positions, *batch.num_tokens) == (0, 10, 1)
    assert not batch.HasField("scale")
    assert sequence.num_computed_tokens == 10


def test_an_attention_call_that_failed_starts_at_the_same_position_again(fake, sequence):
    fake.will("Prefill", errors.SequenceBusyError(7), grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(errors.SequenceBusyError):
        sequence.prefill(0, _q(2), _q(2), _q(2))
    with pytest.raises(DeadlineExceededError):
        sequence.prefill(0, _q(2), _q(2), _q(2))
    sequence.prefill(0, _q(2), _q(2), _q(2))
    starts = [list(request.batch.start_positions) for request in fake.requests["Prefill"]]
    assert starts == [[8], [8], [8]]


def test_an_append_takes_the_computed_counts_back_to_the_valid_tokens(fake, sequence):
    for layer in (0, 1):
        sequence.prefill(layer, _q(5), _q(5), _q(5))
    fake.will("Append", _appended())
    assert sequence.append([1, 2], num_kv_valid=1, num_lookahead_tokens=3) == AppendResult(
        ResultCode.OK
    )
    (request,) = fake.requests["Append"]
    assert list(request.start_positions) == [10]
    assert list(request.num_tokens) == [2]
    assert list(request.num_kv_valid) == [1]
    assert list(request.num_lookahead_tokens) == [3]
    assert sequence.num_tokens == 12
    assert sequence.num_computed_tokens == 11
    sequence.decode(1, _q(1), _q(1), _q(1))
    assert list(fake.requests["Decode"][0].batch.start_positions) == [11]


def test_an_append_without_valid_tokens_takes_the_counts_back_to_the_old_length(fake, sequence):
    sequence.prefill(0, _q(5), _q(5), _q(5))
    fake.will("Append", _appended())
    sequence.append([1])
    sequence.decode(0, _q(1), _q(1), _q(1))
    sequence.decode(1, _q(1), _q(1), _q(1))
    starts = [list(request.batch.start_positions) for request in fake.requests["Decode"]]
    assert starts == [[10], [8]]


def test_the_block_table_follows_appends(fake, sequence):
    fake.will("Append", _appended(new=(20, 21), copy=(7, 30)), _appended(new=(22,)))
    result = sequence.append(range(8))
    assert result == AppendResult(ResultCode.OK, (20, 21), (BlockCopy(7, 30),))
    assert sequence.block_ids.tolist() == [5, 6, 30, 8, 20, 21]
    sequence.append([1])
    assert sequence.block_ids.tolist() == [5, 6, 30, 8, 20, 21, 22]


def test_a_truncate_cuts_counts_lookahead_and_table(fake, sequence):
    sequence.prefill(0, _q(2), _q(2), _q(2))
    fake.will("Truncate", cache_pb2.TruncateResponse(dropped_block_ids=[7, 8]))
    assert sequence.truncate(7) == (7, 8)
    (request,) = fake.requests["Truncate"]
    assert (request.num_tokens_before, request.num_tokens_after) == (10, 7)
    assert sequence.num_tokens == 7
    assert sequence.num_computed_tokens == 7
    assert sequence.block_ids.tolist() == [5, 6]


def test_a_fork_gives_children_that_have_all_and_drops_the_lookahead(client, fake, sequence):
    for layer in (0, 1):
        sequence.prefill(layer, _q(2), _q(2), _q(2))
    fake.will("Fork", cache_pb2.ForkResponse(sequence_ids=[11, 12]))
    fake.will("Append", _appended(copy=(7, 9)))
    first, second = sequence.fork(2)
    (request,) = fake.requests["Fork"]
    assert request.num_tokens == 10
    assert len(set(request.request_ids)) == 2
    assert all(request.request_ids)
    assert sequence.block_ids.tolist() == [5, 6, 7]
    for child, child_id in ((first, 11), (second, 12)):
        assert child.sequence_id == child_id
        assert child.num_tokens == child.num_cached_tokens == child.num_computed_tokens == 10
        assert child.block_ids.tolist() == [5, 6, 7]
    with first, second:
        first.append([1])
    assert first.block_ids.tolist() == [5, 6, 9]
    assert second.block_ids.tolist() == sequence.block_ids.tolist() == [5, 6, 7]
    assert [list(r.sequence_ids) for r in fake.requests["Free"]] == [[12], [11]]


def test_names_of_children_are_one_each(fake, sequence):
    fake.will("Fork", cache_pb2.ForkResponse(sequence_ids=[11, 12]))
    sequence.fork(2, request_ids=["a", "b"])
    assert list(fake.requests["Fork"][0].request_ids) == ["a", "b"]
    for bad in (["a"], ["a", ""], []):
        with pytest.raises(InvalidArgumentError):
            sequence.fork(2, request_ids=bad)
    assert len(fake.requests["Fork"]) == 1


def test_commits_go_on_where_the_last_one_ended(client, fake):
    info = info_reply(device="none")
    info.ClearField("layout")
    fake.will("GetServerInfo", info)
    fake.will("Allocate", allocated(7, cached=4, blocks=(0, 1, 2)))
    fake.will("Commit", *[cache_pb2.CommitResponse(result_codes=[1], num_cached_blocks=[2])] * 2)
    sequence = client.sequence(range(10))
    assert sequence.commit(4) == CommitResult(ResultCode.OK, 2)
    sequence.commit(2)
    assert [
        (*request.start_positions, *request.num_computed_tokens)
        for request in fake.requests["Commit"]
    ] == [(4, 4), (8, 2)]
    assert sequence.num_computed_tokens == 10


@pytest.mark.parametrize("layer", [-1, 2**32])
def test_a_layer_that_cannot_be_is_refused(fake, sequence, layer):
    with pytest.raises(InvalidArgumentError) as caught:
        sequence.prefill(layer, _q(1), _q(1), _q(1))
    assert caught.value.field == "layer"
    assert not fake.requests["Prefill"]


def test_a_layer_that_is_not_there_is_left_to_the_daemon(fake, sequence):
    fake.will("Decode", InvalidArgumentError("layer", "is 2, there are 2"))
    with pytest.raises(InvalidArgumentError, match="is 2, there are 2"):
        sequence.decode(2, _q(1), _q(1), _q(1))


# ---- refusals


def test_every_code_but_ok_has_an_error():
    assert set(ROW_ERRORS) == set(ResultCode) - {ResultCode.OK}


@pytest.mark.parametrize("code", sorted(ROW_ERRORS))
def test_a_refused_append_is_raised_and_moves_nothing(fake, sequence, code):
    fake.will("Append", _appended(code))
    with pytest.raises(ROW_ERRORS[code][0]) as caught:
        sequence.append([1], num_kv_valid=0)
    assert type(caught.value) is ROW_ERRORS[code][0]
    assert caught.value.fields["sequence_id"] == sequence.sequence_id
    assert caught.value.fields["position"] == 10
    assert caught.value.fields["free"] == 3
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (10, 8)
    assert sequence.block_ids.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("code", sorted(ROW_ERRORS))
def test_a_refused_commit_is_raised_and_moves_nothing(fake, sequence, code):
    fake.will("Commit", cache_pb2.CommitResponse(result_codes=[code], num_cached_blocks=[0]))
    with pytest.raises(ROW_ERRORS[code][0], match="given 20, limit 10"):
        sequence.commit(12)
    assert sequence.num_computed_tokens == 8


def test_a_code_of_a_newer_daemon_is_an_internal_error(fake, sequence):
    fake.will("Append", _appended(99))
    with pytest.raises(InternalError, match="99"):
        sequence.append([1])


@pytest.mark.parametrize(
    "error",
    [SequenceNotFoundError(7), NoRoomError(12, 3, 40), errors.WrongPositionError(7, 1, 2)],
    ids=lambda error: error.reason,
)
@pytest.mark.parametrize("method", ["Truncate", "Fork", "Prefill"])
def test_a_failed_call_moves_nothing(fake, sequence, method, error):
    fake.will(method, error)
    calls = {
        "Truncate": lambda: sequence.truncate(3),
        "Fork": lambda: sequence.fork(),
        "Prefill": lambda: sequence.prefill(0, _q(2), _q(2), _q(2)),
    }
    with pytest.raises(type(error)) as caught:
        calls[method]()
    assert caught.value.message == error.message
    assert caught.value.fields["boot_id"] == bytes(range(16)).hex()
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (10, 8)
    assert sequence.block_ids.tolist() == [5, 6, 7, 8]
