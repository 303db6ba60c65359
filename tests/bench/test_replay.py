"""`prefixcache bench replay`, with a small trace."""

from __future__ import annotations

import json

import pytest

from prefixcache.cli import main
from prefixcache.core.hashing import HASH_ALGORITHMS
from tests.bench.run_bench import EDGE, EDGE_SIZES, report_of, rows_named, run_bench


def counts_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    """Of `prefixcache replay`, one pool."""
    with pytest.raises(SystemExit):
        main(["replay", EDGE, *EDGE_SIZES, "--json", *arguments])
    row: dict[str, int] = json.loads(capsys.readouterr().out)
    return row


@pytest.mark.parametrize(("blocks", "pool"), [((), "inf"), (("--blocks", "100"), "100")])
def test_each_recipe_hits_what_a_replay_counts(
    blocks: tuple[str, ...], pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = counts_of(capsys, "--blocks", pool, "--first", "50")
    report = report_of(
        capsys, "replay", EDGE, *EDGE_SIZES, *blocks, "--rounds", "2", "--requests", "50"
    )
    assert report["bench"] == "replay"
    for algorithm in HASH_ALGORITHMS:
        whole, requests_a_second, blocks_a_second = rows_named(report, algorithm)
        assert whole["requests"] == 50
        assert whole["query_blocks"] == counts["query_blocks"]
        assert whole["hit_blocks"] == counts["hit_blocks"]
        assert whole["count"] == 2
        assert whole["median_s"] > 0
        assert requests_a_second["max_per_s"] == pytest.approx(50 / whole["min_s"], rel=1e-4)
        assert blocks_a_second["median_per_s"] > requests_a_second["median_per_s"]


def test_quick_reads_fewer_requests_and_a_table_names_each_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = run_bench(
        capsys, "replay", EDGE, *EDGE_SIZES, "--quick", "--algorithms", "xxh3,sha256_cbor"
    )
    lines = [line for line in text.splitlines() if line.startswith(("xxh3", "sha256_cbor"))]
    assert len(lines) == 6
    assert " 200 " in lines[0]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([EDGE, "--trace-block", "4", "--block-size", "3"], "does not divide"),
        ([EDGE], "line 1: has 2 ids for 7 tokens"),
        (["/no/such/file"], "does not exist"),
        ([EDGE, *EDGE_SIZES, "--peer", "other"], "--peer"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "replay", *arguments])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert problem in " ".join(captured.err.replace("│", " ").split())
    assert captured.out == ""
