"""`prefixcache replay`, through its own command line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.storage.layout import KVLayout
from tests.replay.cuts import FOLDER, Row, expected_rows
from tests.support.command_line import Outcome, call
from tests.support.daemon import RunningDaemon, running_daemon

EDGE = str(FOLDER / "edge_4.jsonl")
EDGE_SIZES = ["--trace-block", "4", "--block-size", "4"]

Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls `prefixcache replay` with the arguments given."""
    return partial(call, capsys, "replay")


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(num_blocks=100, block_size=4)) as running:
        yield running


def rows_of(outcome: Outcome) -> list[Row]:
    assert outcome.exit_code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def oracle_rows(trace: str, block_size: int, pools: tuple[str, ...]) -> list[Row]:
    rows = {
        row["pool"]: row
        for row in expected_rows()
        if row["trace"] == trace and row["block_size"] == block_size
    }
    return [
        {name: value for name, value in rows[pool].items() if name not in ("trace", "trace_block")}
        for pool in pools
    ]


def without_our_own(rows: list[Row]) -> list[Row]:
    ours = ("num_cached_tokens", "seconds", "hash_algorithm")
    return [{name: value for name, value in row.items() if name not in ours} for row in rows]


def test_json_rows_are_the_oracles_whole_rows_and_our_own_counts(run: Run) -> None:
    rows = rows_of(run(EDGE, "--blocks", "30,100,400,inf", *EDGE_SIZES, "--json"))
    assert without_our_own(rows) == oracle_rows("edge_4", 4, ("30", "100", "400", "inf"))
    assert all(row["num_cached_tokens"] < row["hit_tokens"] for row in rows)
    assert all(row["hash_algorithm"] == "sha256_cbor" and row["seconds"] >= 0 for row in rows)


def test_block_size_is_the_trace_block_by_default(run: Run) -> None:
    trace = str(FOLDER / "mooncake_conversation.jsonl")
    rows = rows_of(run(trace, "--blocks", "60", "--json"))
    assert without_our_own(rows) == oracle_rows("mooncake_conversation", 512, ("60",))


def test_smaller_blocks_than_the_traces_cut_its_blocks(run: Run) -> None:
    trace = str(FOLDER / "agentic_64.jsonl")
    arguments = ("--blocks", "1200", "--trace-block", "64", "--block-size", "16", "--json")
    rows = rows_of(run(trace, *arguments, "--hash-algorithm", "xxh3"))
    assert without_our_own(rows) == oracle_rows("agentic_64", 16, ("1200",))
    assert rows[0]["hash_algorithm"] == "xxh3"


def test_without_json_a_table_shows_one_line_a_pool_size(run: Run) -> None:
    result = run(EDGE, "--blocks", "30,100", *EDGE_SIZES)
    assert result.exit_code == 0
    headings, *lines = result.stdout.splitlines()
    assert "hit rate" in headings
    expected = oracle_rows("edge_4", 4, ("30", "100"))
    for line, row in zip(lines, expected, strict=True):
        cells = line.split()
        assert cells[0] == row["pool"]
        assert str(row["hit_blocks"]) in cells
        assert str(row["evictions"]) in cells
        assert cells[-1] == row["digest"][:16]


def test_first_cuts_the_trace(run: Run) -> None:
    rows = rows_of(run(EDGE, "--blocks", "100", *EDGE_SIZES, "--first", "7", "--json"))
    assert rows[0]["requests"] == 7


def test_nothing_but_the_rows_is_printed_where_stderr_is_no_terminal(run: Run) -> None:
    assert run(EDGE, "--blocks", "100", *EDGE_SIZES, "--json").stderr == ""


def test_a_terminal_on_stderr_shows_progress_and_stdout_has_only_rows() -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "prefixcache.cli", "replay", EDGE, *EDGE_SIZES]
    ended = subprocess.run(
        [*command, "--blocks", "100", "--json"],
        env={**os.environ, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        check=True,
        timeout=60,
    )
    os.close(terminal)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "100 blocks" in shown
    assert [json.loads(line)["pool"] for line in ended.stdout.splitlines()] == ["100"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/no/such/file", "--blocks", "10"], "does not exist"),
        ([str(FOLDER), "--blocks", "10"], "is a directory"),
        ([EDGE], "--blocks"),
        ([EDGE, *EDGE_SIZES, "--blocks", "0"], "no pool size"),
        ([EDGE, *EDGE_SIZES, "--blocks", "10,,20"], "no pool size"),
        ([EDGE, *EDGE_SIZES, "--blocks", "10.5"], "no pool size"),
        ([EDGE, *EDGE_SIZES, "--blocks", str(2**31)], "no pool size"),
        ([EDGE, "--trace-block", "4", "--block-size", "3", "--blocks", "10"], "does not divide"),
        ([EDGE, "--trace-block", "4", "--block-size", "8", "--blocks", "10"], "does not divide"),
        ([EDGE, "--trace-block", "4", "--block-size", "0", "--blocks", "10"], "--block-size"),
        ([EDGE, "--blocks", "10"], "line 1: has 2 ids for 7 tokens"),
        ([EDGE, *EDGE_SIZES, "--blocks", "10", "--hash-algorithm", "md5"], "--hash-algorithm"),
        ([EDGE, *EDGE_SIZES, "--blocks", "10", "--first", "0"], "--first"),
        ([EDGE, *EDGE_SIZES, "--blocks", "10", "--reset"], "--target"),
        ([EDGE, *EDGE_SIZES, "--blocks", "10", "--unknown"], "--unknown"),
    ],
)
def test_a_usage_error_exits_with_2_and_prints_no_counts(
    run: Run, arguments: list[str], problem: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_a_trace_that_is_not_json_exits_with_2(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("timestamp,tokens\n")
    result = run(str(path), "--blocks", "10")
    assert result.exit_code == 2
    assert "line 1" in result.stderr


def test_through_a_daemon_the_counts_are_the_same(run: Run, daemon: RunningDaemon) -> None:
    arguments = (EDGE, "--trace-block", "4", "--target", daemon.target, "--json")
    rows = rows_of(run(*arguments))
    assert without_our_own(rows) == oracle_rows("edge_4", 4, ("100",))
    assert rows[0]["hash_algorithm"] == "sha256_cbor"


def test_a_daemon_whose_cache_is_not_empty_exits_with_1_unless_reset(
    run: Run, daemon: RunningDaemon
) -> None:
    arguments = (EDGE, *EDGE_SIZES, "--first", "40", "--target", daemon.target, "--json")
    first = rows_of(run(*arguments))
    refused = run(*arguments[:-1])
    assert refused.exit_code == 1
    assert "cached" in refused.stderr
    assert refused.stdout == ""
    again = rows_of(run(*arguments, "--reset"))
    assert without_our_own(again) == without_our_own(first)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--blocks", "30"], "is 30, the daemon has 100"),
        (["--blocks", "100,30"], "is 100,30, the daemon has 100"),
        (["--block-size", "2"], "is 2, the daemon has 4"),
        (["--hash-algorithm", "xxh3"], "is xxh3, the daemon has sha256_cbor"),
    ],
)
def test_options_that_the_daemon_contradicts_exit_with_2(
    run: Run, daemon: RunningDaemon, arguments: list[str], problem: str
) -> None:
    result = run(EDGE, "--trace-block", "4", "--target", daemon.target, *arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_blocks_of_the_daemon_that_do_not_divide_the_traces_exit_with_2(
    run: Run, daemon: RunningDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 7, "trace_block": 6, "hash_ids": [1]}\n')
    result = run(str(path), "--target", daemon.target)
    assert result.exit_code == 2
    assert "4 does not divide the trace block of 6" in " ".join(result.stderr.split())


def test_a_daemon_that_holds_kv_is_refused_before_anything_is_sent(run: Run) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    with running_daemon(CacheOptions(100, block_size=4), ModelOptions(layout=layout)) as daemon:
        result = run(EDGE, "--trace-block", "4", "--target", daemon.target)
        assert daemon.daemon.sequences.stats().requests == 0
    assert result.exit_code == 2
    assert "--storage none" in result.stderr
    assert result.stdout == ""


def test_a_daemon_that_is_not_there_exits_with_1(run: Run, tmp_path: Path) -> None:
    target = f"unix:{tmp_path / 'absent.sock'}"
    result = run(EDGE, *EDGE_SIZES, "--target", target)
    assert result.exit_code == 1
    assert target in result.stderr
