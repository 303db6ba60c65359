from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay import Trace, find_reuse
from prefixcache.replay.working_set import Clock, reuse_gaps, windows
from tests.replay.cuts import cut_trace
from tests.replay.made_traces import random_records, trace_of


def blocks_by_request(trace: Trace, block_size: int) -> list[list[bytes]]:
    """Full blocks as the bytes of all tokens up to their end."""
    return [
        [
            trace.token_ids(request)[: (block + 1) * block_size].tobytes()
            for block in range(request.num_tokens // block_size)
        ]
        for request in trace.requests
    ]


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("width", [0.1, 0.7, 2.5, 100.0])
def test_windows_count_distinct_and_never_seen_blocks(
    tmp_path: Path, block_size: int, width: float
) -> None:
    trace = trace_of(tmp_path, random_records(5, 60, 4), 4)
    found = windows(Clock(trace), find_reuse(trace, block_size), width)
    blocks = blocks_by_request(trace, block_size)
    seen: set[bytes] = set()
    last = len(found) - 1
    for index, window in enumerate(found):
        within = [
            asked
            for asked, request in zip(blocks, trace.requests, strict=True)
            if min(int((request.timestamp_ms or 0) / 1000 // width), last) == index
        ]
        distinct = {block for asked in within for block in asked}
        assert window.requests == len(within)
        assert window.query_blocks == sum(map(len, within))
        assert window.distinct_blocks == len(distinct)
        assert window.new_blocks == len(distinct - seen)
        seen |= distinct
    assert sum(window.requests for window in found) == 60


def test_by_default_twelve_windows_cover_the_trace() -> None:
    trace = cut_trace("mooncake_conversation", 512)
    found = windows(Clock(trace), find_reuse(trace, 512))
    assert len(found) == 12
    assert found[0].start == 0
    assert found[-1].end == pytest.approx(Clock(trace).times[-1])
    assert all(a.end == pytest.approx(b.start) for a, b in pairwise(found))


def test_without_all_timestamps_the_clock_counts_requests(tmp_path: Path) -> None:
    record = {"input_length": 4, "hash_ids": [1]}
    trace = trace_of(tmp_path, [{**record, "timestamp": 5}, record, record], 4)
    clock = Clock(trace)
    assert (clock.unit, clock.times.tolist()) == ("requests", [0, 1, 2])
    found = windows(clock, find_reuse(trace, 4), 2.0)
    assert [window.requests for window in found] == [3]
    assert [window.requests for window in windows(clock, find_reuse(trace, 4), 1.0)] == [1, 2]


def test_a_clock_starts_at_zero_and_never_goes_back(tmp_path: Path) -> None:
    stamps = [7000, 9000, 8000, 9500]
    records = [{"timestamp": t, "input_length": 4, "hash_ids": [1]} for t in stamps]
    assert Clock(trace_of(tmp_path, records, 4)).times.tolist() == [0, 2, 2, 2.5]


def test_gaps_are_the_waits_of_blocks_that_are_asked_for_again(tmp_path: Path) -> None:
    records = [
        {"timestamp": 0, "input_length": 12, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 4, "hash_ids": [1]},
        {"timestamp": 5000, "input_length": 12, "hash_ids": [1, 2, 3]},
        {"timestamp": 6000, "input_length": 4, "hash_ids": [9]},
    ]
    trace = trace_of(tmp_path, records, 4)
    gaps = reuse_gaps(Clock(trace), find_reuse(trace, 4))
    assert gaps.num_blocks == 4  # 1 after 1 s, 1 after 4 s, and 2, 3 after 5 s
    assert gaps.gaps.tolist() == [1, 4, 5]
    assert gaps.shares.tolist() == [0.25, 0.5, 1]
    assert gaps.quantiles == (1, 4, 5, 5)


def test_a_trace_without_reuse_has_no_gaps_and_without_requests_no_windows(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [{"timestamp": 3, "input_length": 4, "hash_ids": [1]}], 4)
    reuse = find_reuse(trace, 4)
    assert reuse_gaps(Clock(trace), reuse).quantiles == (0, 0, 0, 0)
    assert [window.distinct_blocks for window in windows(Clock(trace), reuse)] == [1]
    nothing = trace_of(tmp_path, [], 4)
    assert windows(Clock(nothing), find_reuse(nothing, 4)) == ()


def test_too_many_windows_are_refused() -> None:
    trace = cut_trace("edge_4", 4)
    with pytest.raises(InvalidArgumentError, match="must make 1000 at most"):
        windows(Clock(trace), find_reuse(trace, 4), 0.001)
