"""Traces in other formats: prompts as text, and CSV without prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay import InProcessTarget, Trace, find_reuse, read_trace, replay_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def text_trace(folder: Path, *prompts: str, trace_block: int | None = None) -> Trace:
    path = folder / "text.jsonl"
    lines = [
        {"timestamp": 10 * index, "requests": [{"prompt": prompt, "Prompt Length": 9}]}
        for index, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path, trace_block)


def shared_blocks(trace: Trace, block_size: int) -> int:
    """Hits of the second prompt on the first."""
    return replay_trace(trace, InProcessTarget(1000, block_size)).hit_blocks


def csv_trace(folder: Path, text: str, trace_block: int | None = None) -> Trace:
    path = folder / "trace.csv"
    path.write_bytes(text.encode())
    return read_trace(path, trace_block)


def test_text_is_cut_into_tokens_of_four_bytes(tmp_path: Path) -> None:
    trace = text_trace(tmp_path, "x", "abcd", "abcde", "ä" * 100)
    assert [request.num_tokens for request in trace.requests] == [1, 1, 2, 50]
    assert [request.timestamp_ms for request in trace.requests] == [0, 10, 20, 30]
    assert trace.trace_block == 16


@pytest.mark.parametrize(
    ("num_shared", "num_blocks"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2), (640, 10)]
)
def test_prompts_share_the_blocks_of_the_text_that_they_share(
    tmp_path: Path, num_shared: int, num_blocks: int
) -> None:
    same = "".join(chr(97 + index % 7) for index in range(num_shared))
    trace = text_trace(tmp_path, same + "1" * 90, same + "2" * 200)
    assert shared_blocks(trace, 16) == num_blocks
    assert find_reuse(trace, 16).num_blocks.sum() == num_blocks


def test_a_last_token_of_fewer_bytes_ends_a_full_block(tmp_path: Path) -> None:
    assert shared_blocks(text_trace(tmp_path, "a" * 61, "a" * 61), 16) == 1
    assert shared_blocks(text_trace(tmp_path, "a" * 61, "a" * 64), 16) == 0


def test_the_trace_block_of_text_may_be_chosen(tmp_path: Path) -> None:
    trace = text_trace(tmp_path, "a" * 20 + "b", "a" * 20 + "c", trace_block=2)
    assert trace.trace_block == 2
    assert shared_blocks(trace, 2) == 2


def test_a_line_of_text_may_hold_several_requests(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    both = [{"prompt": "a" * 70}, {"prompt": "a" * 70}]
    path.write_text(json.dumps({"timestamp": 5, "requests": both}) + "\n")
    trace = read_trace(path)
    assert [request.timestamp_ms for request in trace.requests] == [5, 5]
    assert shared_blocks(trace, 16) == 1
    one, two = (trace.token_ids(request).tolist() for request in trace.requests)
    assert one[:16] == two[:16]
    assert one[16:] != two[16:]


def test_csv_has_times_and_lengths_and_nothing_shared(tmp_path: Path) -> None:
    trace = csv_trace(
        tmp_path,
        HEADER
        + "2023-11-16 18:17:03.9799600,4808,10\r\n"
        + "2023-11-16 18:17:04.4799600,4808,8\r\n"
        + "2023-11-16 18:18:04,3,8\r\n",
    )
    assert trace.trace_block == 512
    assert [request.num_tokens for request in trace.requests] == [4808, 4808, 3]
    start_ms, *later = (request.timestamp_ms or 0 for request in trace.requests)
    assert [each - start_ms for each in later] == pytest.approx([500, 60020.04], abs=0.01)
    assert shared_blocks(trace, 512) == 0
    assert find_reuse(trace, 16).num_new.sum() == 600


def test_a_byte_order_mark_before_csv_is_no_matter(tmp_path: Path) -> None:
    trace = csv_trace(tmp_path, "\ufeff" + HEADER + "2023-11-16 18:17:03,5,1\r\n", 4)
    assert (trace.trace_block, trace.num_tokens) == (4, 5)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"requests": 1}', "requests is not a list"),
        ('{"requests": [1]}', "prompt is not a text"),
        ('{"requests": [{"Prompt Length": 3}]}', "prompt is not a text"),
        ('{"requests": [{"prompt": "\\ud800"}]}', "no Unicode text"),
        ('{"requests": [{"prompt": ""}]}', "input_length is 0"),
        ('{"timestamp": "now", "requests": [{"prompt": "a"}]}', "timestamp is 'now'"),
    ],
)
def test_bad_text_is_refused_by_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"requests": [{"prompt": "a"}]}\n' + line + "\n")
    with pytest.raises(InvalidArgumentError, match="line 2") as caught:
        read_trace(path)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("yesterday,5,1", "line 2: is no row"),
        ("2023-11-16 18:17:03", "line 2: is no row"),
        ("2023-11-16 18:17:03,many,1", "line 2: is no row"),
        ("2023-11-16 18:17:03,0,1", "line 2: input_length is 0"),
        ("2023-11-16 18:17:03,-600,1", "line 2: input_length is -600"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        csv_trace(tmp_path, HEADER + row + "\r\n")


def test_csv_without_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no column ContextTokens"):
        csv_trace(tmp_path, "TIMESTAMP,Tokens\n2023-11-16 18:17:03,5\n")
