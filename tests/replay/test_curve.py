"""One walk gives the counts that replays of every pool size give."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay import (
    HitCurve,
    InProcessTarget,
    PoolCounts,
    Trace,
    find_reuse,
    replay_trace,
)
from tests.replay.cuts import Row, cut_trace, expected_rows, pool_size, row_name
from tests.replay.made_traces import random_records, trace_of

COUNTS = [field.name for field in fields(PoolCounts)]


def curve_of(trace: Trace, block_size: int, max_blocks: int | None = None) -> HitCurve:
    return HitCurve(trace, find_reuse(trace, block_size, max_blocks))


def replayed(trace: Trace, block_size: int, num_blocks: int) -> PoolCounts:
    result = replay_trace(trace, InProcessTarget(num_blocks, block_size, "xxh3"))
    return PoolCounts(**{name: getattr(result, name) for name in COUNTS})


def largest_request(trace: Trace, block_size: int) -> int:
    return max(-(-request.num_tokens // block_size) for request in trace.requests)


@pytest.mark.parametrize("row", expected_rows(), ids=row_name)
def test_counts_are_the_oracles(row: Row) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    num_blocks = pool_size(trace, row)
    counts = curve_of(trace, row["block_size"], num_blocks).at(num_blocks)
    expected = {name: row[name] for name in COUNTS if name in row}
    assert len(expected) >= 9
    assert {name: getattr(counts, name) for name in expected} == expected


@pytest.mark.parametrize(("trace_block", "block_size"), [(4, 4), (4, 2), (4, 1), (2, 4), (2, 6)])
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_a_replay_at_every_pool_size(
    tmp_path: Path, seed: int, trace_block: int, block_size: int
) -> None:
    trace = trace_of(tmp_path, random_records(seed, 40, trace_block), trace_block)
    largest = largest_request(trace, block_size)
    curve = curve_of(trace, block_size)
    for num_blocks in range(largest, curve.best_size + 3):
        assert curve.at(num_blocks) == replayed(trace, block_size, num_blocks)
    for num_blocks in range(1, largest):
        counts = curve_of(trace, block_size, num_blocks).at(num_blocks)
        assert counts == replayed(trace, block_size, num_blocks)
        assert counts.rejected > 0


@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_whole_blocks_only_never_leave_a_block_blank(tmp_path: Path, seed: int) -> None:
    records = random_records(seed, 50, trace_block=4, num_branches=3)
    whole = [record for record in records if record["input_length"] % 4 == 0]
    trace = trace_of(tmp_path, whole, 4)
    curve = curve_of(trace, 4)
    for num_blocks in range(largest_request(trace, 4), curve.best_size + 2):
        assert curve.at(num_blocks) == replayed(trace, 4, num_blocks)


def test_a_larger_pool_never_hits_less() -> None:
    curve = curve_of(cut_trace("edge_4", 4), 4)
    hits = curve.hit_blocks(np.arange(2 * curve.best_size))
    assert (np.diff(hits) >= 0).all()
    assert hits[curve.best_size] == curve.most_hit_blocks > hits[curve.best_size - 1]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999, 1.0])
def test_the_smallest_pool_for_a_share_of_the_hits_is_the_smallest(share: float) -> None:
    curve = curve_of(cut_trace("mooncake_synthetic", 512), 512)
    size = curve.smallest_pool(share)
    assert curve.hit_blocks(size) >= share * curve.most_hit_blocks
    assert curve.hit_blocks(size - 1) < share * curve.most_hit_blocks


def test_doubling_is_worth_its_least_gain_just_below_where_it_stops() -> None:
    trace = cut_trace("edge_4", 4)
    curve = curve_of(trace, 4)
    queries = curve.at(curve.best_size).query_blocks
    stop = curve.doubling_stops_at(0.02)
    gains = [
        int(curve.hit_blocks(2 * size) - curve.hit_blocks(size)) / queries
        for size in range(stop - 1, curve.best_size)
    ]
    assert gains[0] >= 0.02
    assert max(gains[1:]) < 0.02
    assert curve.doubling_stops_at(2.0) == 1


def test_a_trace_without_requests_or_without_full_blocks_has_no_hits(tmp_path: Path) -> None:
    nothing = curve_of(trace_of(tmp_path, [], 4), 4)
    assert nothing.at(5) == PoolCounts(5, 4, 0, 0, 0, 0, 0, 0, 0, 0)
    assert (nothing.best_size, nothing.smallest_pool(1.0), nothing.doubling_stops_at(0.01)) == (
        1,
        1,
        1,
    )
    short = [{"input_length": 3, "hash_ids": [1]}] * 2
    trace = trace_of(tmp_path, short, 4)
    assert curve_of(trace, 4).at(1) == replayed(trace, 4, 1)


@pytest.mark.parametrize("block_size", [3, 6, 1000])
def test_blocks_that_do_not_end_with_the_traces_are_refused(block_size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="neither divides") as caught:
        find_reuse(cut_trace("edge_4", 4), block_size if block_size != 1000 else 1001)
    assert caught.value.field == "block_size"
