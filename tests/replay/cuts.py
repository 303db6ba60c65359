"""The cut traces in tests/data/traces and the oracle's counts of them."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from prefixcache.replay import ReplayResult, Trace, read_trace

FOLDER = Path(__file__).parents[1] / "data" / "traces"
Row = dict[str, Any]


def expected_rows() -> list[Row]:
    return [json.loads(line) for line in (FOLDER / "expected.jsonl").read_text().splitlines()]


def row_name(row: Row) -> str:
    return f"{row['trace']}-{row['block_size']}-{row['pool']}"


@cache
def cut_trace(name: str, trace_block: int) -> Trace:
    return read_trace(FOLDER / f"{name}.jsonl", trace_block)


def pool_size(trace: Trace, row: Row) -> int:
    if row["pool"] == "inf":
        return trace.num_blocks_without_eviction(row["block_size"])
    return int(row["pool"])


def assert_counts_equal(result: ReplayResult, row: Row) -> None:
    """All that the oracle and we both count, the digest over every request included."""
    names = {field.name for field in fields(ReplayResult)} & row.keys()
    assert "digest" in names
    assert {name: getattr(result, name) for name in names} == {name: row[name] for name in names}
