"""Metrics, GetStats, a mirror of the events and the oracle tell the same of one replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay.cuts import (
    Row,
    assert_counts_equal,
    cut_trace,
    expected_rows,
    pool_size,
    row_name,
)
from tests.replay.witnesses import Counts, Trial, try_replay

# Long prompts, rejections, prompts that are cached whole, and pools that never evict.
CASES = {
    "mooncake_conversation-512-60",
    "mooncake_conversation-512-10",
    "mooncake_conversation-512-inf",
    "mooncake_conversation-16-2000",
    "edge_4-4-100",
    "edge_4-1-20",
}
ROWS = [row for row in expected_rows() if row_name(row) in CASES]


def of_oracle(row: Row) -> Counts:
    return Counts(
        row["requests"] - row["rejected"],
        row["query_blocks"],
        row["hit_blocks"],
        row["evictions"],
        row["cached_end"],
        row["digest"],
    )


def assert_agreement(trial: Trial, row: Row) -> None:
    assert_counts_equal(trial.result, row)
    truth = of_oracle(row)
    sums = {**vars(truth), "digest": ""}
    assert {name: vars(one) for name, one in trial.counts.items()} == {
        "replay": vars(truth),
        "mirror": vars(truth),
        "GetStats": sums,
        "metrics": sums,
    }
    assert trial.mirrored == trial.listed
    assert len(trial.mirrored) == truth.cached


def test_all_cases_are_there() -> None:
    assert len(ROWS) == len(CASES)


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_all_witnesses_say_what_the_oracle_says(row: Row, tmp_path: Path) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    trial = try_replay(trace, row["block_size"], pool_size(trace, row), tmp_path)
    assert_agreement(trial, row)
