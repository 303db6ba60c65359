"""`prefixcache analyze`, through its own command line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefixcache.replay import InProcessTarget, PoolCounts, replay_trace
from prefixcache.storage.layout import KVLayout, Quantization
from tests.replay.cuts import FOLDER, cut_trace
from tests.support.command_line import Outcome, call

EDGE = str(FOLDER / "edge_4.jsonl")
EDGE_BLOCK = ["--trace-block", "4"]
AGENTIC = [str(FOLDER / "agentic_64.jsonl"), "--trace-block", "64"]
LAYOUT = ["--num-layers", "2", "--num-kv-heads", "4", "--head-dim", "8", "--dtype", "float16"]

Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls `prefixcache analyze` with the arguments given."""
    return partial(call, capsys, "analyze")


def objects_of(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.exit_code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def counts_of_a_replay(name: str, trace_block: int, block_size: int, num_blocks: int) -> object:
    result = replay_trace(cut_trace(name, trace_block), InProcessTarget(num_blocks, block_size))
    return {field.name: getattr(result, field.name) for field in fields(PoolCounts)}


@pytest.mark.parametrize(
    ("name", "trace_block", "block_size"),
    [
        ("edge_4", 4, 4),
        ("edge_4", 4, 2),
        ("edge_4", 4, 8),
        ("mooncake_conversation", 512, 512),
        ("mooncake_conversation", 512, 128),
        ("mooncake_synthetic", 512, 512),
        ("agentic_64", 64, 64),
    ],
)
def test_every_row_is_what_a_replay_counts(
    run: Run, name: str, trace_block: int, block_size: int
) -> None:
    arguments = ("--trace-block", str(trace_block), "--block-size", str(block_size), "--json")
    (found,) = objects_of(run(str(FOLDER / f"{name}.jsonl"), *arguments))
    assert len(found["pools"]) >= 8
    for pool in found["pools"]:
        expected = counts_of_a_replay(name, trace_block, block_size, pool["num_blocks"])
        assert {key: pool[key] for key in expected} == expected  # type: ignore[union-attr]
    rejecting = [p for p in found["pools"] if p["num_blocks"] < found["largest_request_blocks"]]
    assert all(pool["rejected"] > 0 for pool in rejecting)
    assert found["pools"][-1]["hit_blocks"] == found["most_hit_blocks"]


def test_good_sizes_have_their_share_of_the_hits_and_reject_nothing(run: Run) -> None:
    (found,) = objects_of(run(EDGE, *EDGE_BLOCK, "--json"))
    assert [good["share"] for good in found["good_sizes"]] == [0.5, 0.8, 0.9, 0.95, 0.99, 1.0]
    for good in found["good_sizes"]:
        size, wanted = good["num_blocks"], good["share"] * found["most_hit_blocks"]
        (at,) = objects_of(run(EDGE, *EDGE_BLOCK, "--blocks", str(size), "--json"))
        assert at["pools"][0]["rejected"] == 0
        assert at["pools"][0]["hit_blocks"] >= wanted
        (below,) = objects_of(run(EDGE, *EDGE_BLOCK, "--blocks", str(size - 1), "--json"))
        assert below["pools"][0]["hit_blocks"] < wanted


def test_chosen_pools_are_shown_beside_twice_as_much(run: Run) -> None:
    (found,) = objects_of(run(EDGE, *EDGE_BLOCK, "--blocks", "30,100", "--json"))
    assert [pool["num_blocks"] for pool in found["pools"]] == [30, 60, 100, 200]
    text = run(EDGE, *EDGE_BLOCK, "--blocks", "30").stdout
    now, doubled = found["pools"][:2]
    more = doubled["hit_tokens"] - now["hit_tokens"]
    assert more > 0
    assert f"twice 30 blocks: hit rate {now['hit_rate_blocks']:.2%} -> " in text
    assert f"{more:,} prompt tokens more" in text


def test_memory_is_that_of_the_layout(run: Run) -> None:
    layout = KVLayout(2, 4, 8, block_size=16, dtype="float16")
    memory = 1000 * layout.block_bytes
    arguments = (*AGENTIC, "--block-size", "16", *LAYOUT)
    (found,) = objects_of(run(*arguments, "--memory", str(memory), "--json"))
    assert found["block_bytes"] == layout.block_bytes
    assert [pool["num_blocks"] for pool in found["pools"]] == [1000, 2000]
    assert [pool["memory_bytes"] for pool in found["pools"]] == [memory, 2 * memory]
    assert all(
        good["memory_bytes"] == good["num_blocks"] * layout.block_bytes
        for good in found["good_sizes"]
    )
    (quantised,) = objects_of(run(*arguments, "--kv-dtype", "int8", "--json"))
    small = KVLayout(2, 4, 8, 16, "float16", Quantization("int8", "token_head"))
    assert quantised["block_bytes"] == small.block_bytes < layout.block_bytes


def test_the_layout_may_come_of_a_model_config(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "hidden_size": 64,
                "torch_dtype": "float16",
            }
        )
    )
    (found,) = objects_of(run(*AGENTIC, "--model-config", str(config), "--json"))
    assert found["block_bytes"] == KVLayout(2, 4, 8, 64, "float16").block_bytes


def test_block_sizes_are_compared_at_pools_of_as_many_tokens(run: Run) -> None:
    arguments = (*AGENTIC, "--block-size", "16,64,128")
    found = objects_of(run(*arguments, "--json"))
    assert [each["block_size"] for each in found] == [16, 64, 128]
    text = run(*arguments).stdout
    comparison = text[text.index("hit tokens of all prompt tokens by block size") :].splitlines()
    assert comparison[1].split() == ["pool", "tokens", "16", "64", "128"]
    largest = comparison[-3].split()
    best = [each["most_hit_blocks"] * each["block_size"] for each in found]
    rates = [f"{hits / found[0]['prompt_tokens']:.2%}" for hits in best]
    assert largest[1:] == rates
    assert "largest block size within 1% of the most hits" in comparison[-2]


def test_several_traces_are_analysed_one_after_the_other(run: Run) -> None:
    found = objects_of(run(EDGE, EDGE, *EDGE_BLOCK, "--first", "7", "--json"))
    assert [(each["trace"], each["requests"]) for each in found] == [(EDGE, 7)] * 2


def test_windows_have_the_length_that_was_asked_for(run: Run) -> None:
    (found,) = objects_of(run(EDGE, *EDGE_BLOCK, "--window", "2", "--json"))
    assert found["time_unit"] == "s"
    assert [window["start"] for window in found["windows"]] == [0, 2, 4]
    assert sum(window["requests"] for window in found["windows"]) == 600


def test_the_tables_show_the_same_counts(run: Run) -> None:
    (found,) = objects_of(run(EDGE, *EDGE_BLOCK, "--json"))
    text = run(EDGE, *EDGE_BLOCK).stdout
    rows = [line.split() for line in text.splitlines()]
    for pool in found["pools"]:
        (row,) = [row for row in rows if row[:1] == [str(pool["num_blocks"])] and len(row) == 8]
        assert row[2] == f"{pool['hit_rate_blocks']:.2%}"
        assert row[6:] == [f"{pool['evictions']:,}", f"{pool['rejected']:,}"]
    assert f"largest request  {found['largest_request_blocks']} blocks" in text
    assert "blocks asked for again: 2,422" in text


def test_the_readme_shows_what_the_command_prints(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER.parents[2])
    text = Path("README.md").read_text(encoding="utf-8")
    command, shown = text.split("$ prefixcache analyze ")[1].split("```")[0].split("bfloat16\n")
    arguments = [*command.replace("\\\n", " ").split(), "bfloat16"]
    assert run(*arguments).stdout.strip() == shown.strip()


def test_a_plot_is_a_png(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "pool.png"
    arguments = (EDGE, *EDGE_BLOCK, "--block-size", "2,4", "--plot", str(picture))
    assert run(*arguments).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(*AGENTIC, "--first", "1", "--plot", str(picture)).exit_code == 0


def test_a_trace_without_requests_is_analysed_too(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    (found,) = objects_of(run(str(empty), "--json", "--plot", str(tmp_path / "empty.png")))
    assert (found["requests"], found["most_hit_blocks"], found["windows"]) == (0, 0, [])
    assert run(str(empty)).exit_code == 0


def test_a_terminal_on_stderr_shows_progress_and_stdout_has_only_rows() -> None:
    master, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "prefixcache.cli",
        "analyze",
        EDGE,
        *EDGE_BLOCK,
        "--blocks",
        "50",
    ]
    ended = subprocess.run(
        [*command, "--blocks", "50", "--json"],
        env={**os.environ, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        check=True,
        timeout=60,
    )
    os.close(terminal)
    shown = os.read(master, 65536).decode(errors="replace")
    os.close(master)
    assert "blocks of 4" in shown
    assert len(ended.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing argument"),
        (["/no/such/file"], "does not exist"),
        ([EDGE], "line 1: has 2 ids for 7 tokens"),
        ([EDGE, *EDGE_BLOCK, "--block-size", "3"], "neither divides the trace block of 4"),
        ([EDGE, *EDGE_BLOCK, "--block-size", "4,x"], "no list of 1 to"),
        ([EDGE, *EDGE_BLOCK, "--block-size", "0"], "no list of 1 to"),
        ([EDGE, *EDGE_BLOCK, "--blocks", "10,"], "no list of 1 to"),
        ([EDGE, *EDGE_BLOCK, "--blocks", str(2**31)], "no list of 1 to"),
        ([EDGE, *EDGE_BLOCK, "--block-size", "2,4", "--blocks", "9"], "single --block-size"),
        ([EDGE, *EDGE_BLOCK, "--memory", "1GiB"], "--model-config"),
        ([EDGE, *EDGE_BLOCK, *LAYOUT, "--memory", "lots"], "is no size"),
        ([EDGE, *EDGE_BLOCK, *LAYOUT, "--memory", "8"], "one block takes"),
        ([EDGE, *EDGE_BLOCK, *LAYOUT, "--memory", "1GiB", "--blocks", "1"], "cannot go with"),
        ([EDGE, *EDGE_BLOCK, *LAYOUT[:-2]], "--dtype"),
        ([EDGE, *EDGE_BLOCK, *LAYOUT, "--rope-dim", "4"], "latents have no heads"),
        ([EDGE, *EDGE_BLOCK, "--num-layers", "many"], "--num-layers"),
        ([EDGE, *EDGE_BLOCK, "--model-config", "/no/such/config"], "/no/such/config"),
        ([EDGE, *EDGE_BLOCK, "--window", "0"], "is not above 0"),
        ([EDGE, *EDGE_BLOCK, "--window", "nan"], "is not above 0"),
        ([EDGE, *EDGE_BLOCK, "--window", "0.001"], "must make 1000 at most"),
        ([EDGE, *EDGE_BLOCK, "--plot", "/no/such/folder/x.png"], "there is no folder"),
    ],
)
def test_a_usage_error_exits_with_2_and_prints_no_counts(
    run: Run, arguments: list[str], problem: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_a_plot_without_matplotlib_is_a_usage_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixcache.cli.plotting.find_spec", lambda name: None)
    result = run(EDGE, *EDGE_BLOCK, "--plot", "pool.png")
    assert result.exit_code == 2
    assert "prefixcache[plot]" in result.stderr
