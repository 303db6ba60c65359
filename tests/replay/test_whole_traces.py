"""Whole traces against the oracle. `make oracle` sets ORACLE_TRACES to the folder that holds them,
expected.jsonl (the oracle's own counts) and oracle.py, which is run for rows not listed there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prefixcache.replay import (
    InProcessTarget,
    Trace,
    analyze_trace,
    read_trace,
    replay_trace,
)
from tests.replay.cuts import Row, assert_counts_equal, pool_size
from tests.replay.open_target import open_target
from tests.replay.test_witnesses import assert_agreement, of_oracle
from tests.replay.witnesses import try_replay

pytestmark = pytest.mark.oracle

TRACE_BLOCKS = {
    "edge_4": 4,
    "mooncake_conversation": 512,
    "mooncake_synthetic": 512,
    "agentic_64": 64,
}
EDGE_POOLS = ("30", "100", "400", "inf")
POOLS = ("1000", "10000", "100000", "inf")
CASES = [
    *(("edge_4", 4, pool, "sha256_cbor") for pool in EDGE_POOLS),
    ("edge_4", 4, "50", "xxhash_cbor"),
    ("edge_4", 2, "70", "sha256_cbor"),
    ("edge_4", 1, "300", "xxh3"),
    *(("mooncake_conversation", 512, pool, "sha256_cbor") for pool in POOLS),
    ("mooncake_conversation", 512, "10000", "xxhash_cbor"),
    ("mooncake_conversation", 64, "80000", "sha256_cbor"),
    *(("mooncake_synthetic", 512, pool, "sha256_cbor") for pool in POOLS),
    ("mooncake_synthetic", 512, "10000", "xxh3"),
    *(("agentic_64", 64, pool, "sha256_cbor") for pool in POOLS),
    ("agentic_64", 64, "10000", "xxh3"),
]

DAEMON_CASES = [
    ("edge_4", "30"),
    ("edge_4", "100"),
    ("edge_4", "400"),
    ("mooncake_conversation", "10000"),
    ("mooncake_synthetic", "1000"),
    ("agentic_64", "10000"),
]


@pytest.mark.parametrize(("name", "block_size", "pool", "hash_algorithm"), CASES)
def test_counts_equal_the_oracles_at_every_request(
    name: str, block_size: int, pool: str, hash_algorithm: str
) -> None:
    trace, row = whole_trace(name), oracle_row(name, block_size, pool)
    target = InProcessTarget(pool_size(trace, row), block_size, hash_algorithm)
    assert_counts_equal(replay_trace(trace, target), row)


@pytest.mark.parametrize(("name", "pool"), DAEMON_CASES)
def test_counts_are_the_same_through_a_daemon(name: str, pool: str) -> None:
    block_size = TRACE_BLOCKS[name]
    with open_target("daemon", int(pool), block_size) as target:
        result = replay_trace(whole_trace(name), target)
    assert_counts_equal(result, oracle_row(name, block_size, pool))


def test_all_witnesses_of_the_conversation_say_what_the_oracle_says(tmp_path: Path) -> None:
    name, block_size, num_blocks = "mooncake_conversation", 512, 10_000
    row = oracle_row(name, block_size, str(num_blocks))
    trial = try_replay(whole_trace(name), block_size, num_blocks, tmp_path)
    print(trial.table_with(of_oracle(row)))
    assert_agreement(trial, row)
    keys = cached_by_oracle(name, block_size, num_blocks)
    assert trial.mirrored == {trial.hash_of[key] for key in keys}


def test_the_conversation_trace_takes_under_20_seconds_in_process() -> None:
    trace = whole_trace("mooncake_conversation")
    assert replay_trace(trace, InProcessTarget(10_000, 512)).seconds < 20


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("edge_4", 4),
        ("edge_4", 1),
        ("mooncake_conversation", 512),
        ("mooncake_conversation", 128),
        ("mooncake_synthetic", 512),
        ("agentic_64", 64),
    ],
)
def test_an_analysis_has_the_counts_of_replays_at_ten_sizes(name: str, block_size: int) -> None:
    trace = whole_trace(name)
    curve = analyze_trace(trace, block_size).curve
    sizes = [1 + curve.best_size // 3**power for power in range(10)]
    for counts in analyze_trace(trace, block_size, sizes).pools:
        target = InProcessTarget(counts.num_blocks, block_size, "xxh3", verify_hits=False)
        result = replay_trace(trace, target)
        expected = {field.name: getattr(result, field.name) for field in fields(counts)}
        assert asdict(counts) == expected


@pytest.mark.parametrize("name", TRACE_BLOCKS)
def test_an_analysis_has_the_counts_of_the_oracle(name: str) -> None:
    trace, block_size = whole_trace(name), TRACE_BLOCKS[name]
    pools = EDGE_POOLS[:-1] if name == "edge_4" else POOLS[:-1]
    for counts in analyze_trace(trace, block_size, [int(pool) for pool in pools]).pools:
        row = oracle_row(name, block_size, str(counts.num_blocks))
        names = asdict(counts).keys() & row.keys()
        assert len(names) >= 9
        assert {each: getattr(counts, each) for each in names} == {
            each: row[each] for each in names
        }


@pytest.mark.parametrize(
    "file", ["aibrix_prefix_p1024_s128_rps10.jsonl", "azure_2023_conv.csv", "azure_2023_code.csv"]
)
def test_an_analysis_of_other_formats_has_the_counts_of_replays(file: str) -> None:
    trace = read_trace(folder() / file)
    for counts in analyze_trace(trace, trace.trace_block).pools:
        target = InProcessTarget(counts.num_blocks, trace.trace_block, "xxh3", verify_hits=False)
        result = replay_trace(trace, target)
        expected = {field.name: getattr(result, field.name) for field in fields(counts)}
        assert asdict(counts) == expected
    if file.startswith("aibrix"):  # 320 prompts, of which its tokenizer says 86.6 %
        assert analyze_trace(trace, 16).pools[-1].hit_rate_blocks == pytest.approx(0.866, abs=0.005)


def test_the_agentic_trace_is_analysed_in_under_a_minute() -> None:
    start_s = time.perf_counter()
    trace = read_trace(folder() / "agentic_64.jsonl", 64)
    for block_size in (16, 64):
        analyze_trace(trace, block_size)
    assert time.perf_counter() - start_s < 60


def cached_by_oracle(name: str, block_size: int, num_blocks: int) -> set[int]:
    """Keys of the blocks that the oracle has cached at the end."""
    spec = importlib.util.spec_from_file_location("oracle", folder() / "oracle.py")
    assert spec is not None and spec.loader is not None
    oracle: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    pools = []

    class Kept(oracle.Pool):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            pools.append(self)

    oracle.Pool = Kept
    requests = oracle.load(str(folder() / f"{name}.jsonl"), TRACE_BLOCKS[name])
    rules = oracle.PRESETS["radix"]
    oracle.simulate(requests, num_blocks, TRACE_BLOCKS[name], block_size, *rules)
    (pool,) = pools
    return set(pool.map)


def folder() -> Path:
    path = os.environ.get("ORACLE_TRACES")
    if not path:
        raise RuntimeError("ORACLE_TRACES must name the folder of the whole traces: make oracle")
    return Path(path)


@cache
def whole_trace(name: str) -> Trace:
    return read_trace(folder() / f"{name}.jsonl", TRACE_BLOCKS[name])


@cache
def listed_rows() -> dict[tuple[str, int, str], Row]:
    lines = (folder() / "expected.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["preset"] == "radix"]
    return {(row["trace"], row["block_size"], row["pool"]): row for row in rows}


def oracle_row(name: str, block_size: int, pool: str) -> Row:
    listed = listed_rows().get((name, block_size, pool))
    if listed is not None:
        return listed
    command = [
        *(sys.executable, str(folder() / "oracle.py"), str(folder() / f"{name}.jsonl")),
        *("--trace-block", str(TRACE_BLOCKS[name]), "--block-size", str(block_size)),
        *("--preset", "radix", "--pool", pool),
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: Row = json.loads(output)
    return row
