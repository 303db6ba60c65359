from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay import Trace, read_trace
from tests.replay.cuts import FOLDER


def trace_of(folder: Path, *records: object, trace_block: int = 4) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_trace(path, trace_block)


def prompt(trace: Trace, index: int) -> list[int]:
    token_ids: list[int] = trace.token_ids(trace.requests[index]).tolist()
    return token_ids


def test_token_ids_are_those_that_the_oracle_prints() -> None:
    trace = read_trace(FOLDER / "edge_4.jsonl", 4)
    lines = (FOLDER / "edge_4_tokens.jsonl").read_text().splitlines()
    assert len(lines) == 40
    for index, line in enumerate(lines):
        assert prompt(trace, index) == json.loads(line)["tokens"]


def test_token_ids_are_a_contiguous_uint32_column() -> None:
    trace = read_trace(FOLDER / "edge_4.jsonl", 4)
    token_ids = trace.token_ids(trace.requests[0])
    assert token_ids.dtype == np.uint32
    assert token_ids.shape == (trace.requests[0].num_tokens,)
    assert token_ids.flags.c_contiguous


def test_prompts_share_tokens_exactly_as_far_as_their_ids_agree(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"input_length": 12, "hash_ids": [7, 8, 9]},
        {"input_length": 12, "hash_ids": [7, 8, 10]},
    )
    assert prompt(trace, 0)[:8] == prompt(trace, 1)[:8]
    assert not set(prompt(trace, 0)[8:]) & set(prompt(trace, 1)[8:])


def test_an_id_after_another_prefix_is_other_content(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"input_length": 8, "hash_ids": [1, 2]},
        {"input_length": 8, "hash_ids": [2, 1]},
        {"input_length": 8, "hash_ids": [1, 1]},
    )
    tokens = [prompt(trace, index) for index in range(3)]
    assert not set(tokens[0]) & set(tokens[1])
    assert tokens[2][:4] == tokens[0][:4]
    assert not set(tokens[2][4:]) & {*tokens[0], *tokens[1]}


def test_a_partly_filled_block_with_an_id_is_the_start_of_the_full_one(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"input_length": 8, "hash_ids": [1, 2]},
        {"input_length": 6, "hash_ids": [1, 2]},
    )
    assert prompt(trace, 1) == prompt(trace, 0)[:6]


def test_a_tail_without_an_id_is_unlike_any_other(tmp_path: Path) -> None:
    record = {"input_length": 6, "hash_ids": [1]}
    trace = trace_of(tmp_path, record, record)
    assert prompt(trace, 0)[:4] == prompt(trace, 1)[:4]
    assert not set(prompt(trace, 0)[4:]) & set(prompt(trace, 1)[4:])


def test_runs_stand_for_the_same_ids_written_out(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"input_length": 20, "hash_ids": [5, 6, 7, 1, 2]},
        {"input_length": 20, "hash_runs": [[5, 3], [1, 2]]},
    )
    assert prompt(trace, 0) == prompt(trace, 1)


def test_blank_lines_are_skipped_and_first_stops_early(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"input_length": 4, "hash_ids": [%d]}\n'
    path.write_text("\n" + line % 1 + "\n \n" + line % 2 + "not read\n")
    trace = read_trace(path, 4, first=2)
    assert [request.num_tokens for request in trace.requests] == [4, 4]
    assert trace.num_tokens == 8
    assert trace.num_keys == 2


def test_an_empty_file_is_a_trace_without_requests(tmp_path: Path) -> None:
    assert trace_of(tmp_path).requests == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"hash_ids": [1]}', "input_length is None"),
        (b'{"input_length": 0, "hash_ids": []}', "input_length is 0"),
        (b'{"input_length": true, "hash_ids": [1]}', "input_length is True"),
        (b'{"input_length": "4", "hash_ids": [1]}', "input_length is '4'"),
        (b'{"input_length": 4}', "neither hash_ids nor hash_runs"),
        (b'{"input_length": 4, "hash_ids": 1}', "not a list of integers"),
        (b'{"input_length": 4, "hash_ids": ["1"]}', "not a list of integers"),
        (b'{"input_length": 4, "hash_ids": [1.5]}', "not a list of integers"),
        (b'{"input_length": 4, "hash_runs": [1]}', "not a list of [first, count]"),
        (b'{"input_length": 4, "hash_runs": [[1, -1], [1, 2]]}', "not a list of [first, count]"),
        (b'{"input_length": 9, "hash_ids": [1]}', "has 1 ids for 9 tokens"),
        (b'{"input_length": 9, "hash_ids": [1, 2, 3, 4]}', "make 2 or 3"),
        (b'{"input_length": 9, "hash_runs": [[1, 1000000000000]]}', "make 2 or 3"),
        (b'{"input_length": 4, "hash_ids": [1], "timestamp": "1"}', "timestamp is '1'"),
        (b'{"input_length": 4, "hash_ids": [1], "timestamp": NaN}', "timestamp is nan"),
        (b'{"input_length": 4, "hash_ids": [1], "trace_block": 0}', "trace_block is 0"),
        (b'{"input_length": 4, "hash_ids": [1], "trace_block": 2}', "for 2 tokens each, not 4"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": 4, "hash_ids": [1]}\n\n' + line + b"\n")
    with pytest.raises(InvalidArgumentError) as caught:
        read_trace(path, 4)
    assert problem in caught.value.message
    assert caught.value.message.startswith("trace: line 3:")
    assert caught.value.fields["line"] == 3


def test_a_trace_block_that_is_not_the_files_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="trace blocks of 512 tokens"):
        read_trace(FOLDER / "agentic_64.jsonl", 512)


def test_a_trace_says_its_trace_block_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1500, "input_length": 4, "hash_ids": [1, 2], "trace_block": 2}\n'
        '{"timestamp": 1750.5, "input_length": 3, "hash_ids": [1]}\n'
        '{"input_length": 2, "hash_ids": [1]}\n'
    )
    trace = read_trace(path)
    assert trace.trace_block == 2
    assert [request.timestamp_ms for request in trace.requests] == [1500, 1750.5, None]
    assert read_trace(path, 2).trace_block == 2
    with pytest.raises(InvalidArgumentError, match="line 1: its ids stand for 2 tokens each"):
        read_trace(path, 4)


def test_without_a_word_of_it_the_trace_block_is_mooncakes() -> None:
    assert read_trace(FOLDER / "mooncake_synthetic.jsonl").trace_block == 512


def test_as_many_blocks_as_uint32_token_ids_can_tell_apart_are_read(tmp_path: Path) -> None:
    record = {"input_length": 1, "hash_ids": [1]}
    assert trace_of(tmp_path, record, record, trace_block=2**31).num_keys == 1


def test_more_blocks_than_uint32_token_ids_can_tell_apart_are_refused(tmp_path: Path) -> None:
    records = [{"input_length": 1, "hash_ids": [block_id]} for block_id in range(2)]
    with pytest.raises(InvalidArgumentError, match="read fewer requests"):
        trace_of(tmp_path, *records, trace_block=2**31)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.jsonl", 4)
