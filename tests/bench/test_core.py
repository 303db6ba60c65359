"""`prefixcache bench core`, with tiny sizes."""

from __future__ import annotations

from pathlib import Path

import cbor2
import numpy as np
import pytest

from prefixcache.bench.core_calls import chain_bytes
from prefixcache.bench.growth import LIVE_SECTION, POOL_SECTION
from prefixcache.bench.memory import bytes_a_block
from prefixcache.bench.prompts import Prompts
from prefixcache.cli import main
from prefixcache.core.hashing import HASH_ALGORITHMS
from tests.bench.run_bench import TINY_CORE, report_of, rows_named, run_bench


def test_json_has_every_call_of_every_recipe_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, *TINY_CORE)
    assert report["bench"] == "core"
    assert report["settings"]["rounds_done"] == 2
    for algorithm in HASH_ALGORITHMS:
        for tokens in (100, 33):
            (row,) = rows_named(report, "hash", algorithm=algorithm, tokens=tokens)
            assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
            assert row["ratios"]["one digest"] > 0
            for call in ("lookup", "hash + lookup", "allocate, cached", "allocate, new", "commit"):
                (row,) = rows_named(report, call, algorithm=algorithm, tokens=tokens, blocks=3000)
                assert row["count"] == 2
        for rows in (1, 64):
            (row,) = rows_named(report, "append, 1 token a row", algorithm=algorithm, rows=rows)
            assert row["median_s"] > 0
        (row,) = rows_named(report, "bytes a block", algorithm=algorithm)
        assert row["median_bytes"] > 0
    (row,) = rows_named(report, "make a pool", blocks=3000)
    assert row["median_s"] > 0


def test_growth_is_shown_for_each_size_beside_the_smallest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "growth.png"
    text = run_bench(capsys, *TINY_CORE, "--algorithms", "xxh3", "--plot", str(picture))
    assert POOL_SECTION in text
    assert LIVE_SECTION in text
    assert text.count("1x the smallest") >= 5
    assert "sha256_cbor" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_a_usage_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prefixcache.cli.plotting.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "core", "--plot", "growth.png"])
    assert ended.value.code == 2
    assert "prefixcache[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tokens", "many"], "--tokens"),
        (["--blocks", "0"], "less than 1"),
        (["--algorithms", "md5"], "'md5' is none of sha256_cbor"),
        (["--blocks", "100"], "too small a pool"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "core", *arguments])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert problem in " ".join(captured.err.replace("│", " ").split())
    assert captured.out == ""


def test_the_floor_of_hashing_digests_what_the_chain_digests() -> None:
    tokens = np.array([0, 23, 24, 70_000, 5], dtype=np.uint32)
    sha, raw = HASH_ALGORITHMS["sha256_cbor"], HASH_ALGORITHMS["xxh3"]
    blocks = [cbor2.dumps([bytes(32), ids, None]) for ids in ([0, 23], [24, 70_000])]
    assert chain_bytes(sha, tokens, 2) == b"".join(blocks)
    assert len(chain_bytes(raw, tokens, 2)) == 2 * (16 + 8)


def test_prompts_of_one_length_differ_from_their_first_token_on() -> None:
    prompts = Prompts(5)
    first, second = prompts.next(), prompts.next()
    assert first.dtype == np.uint32
    assert first[0] != second[0]
    assert (first[1:] == second[1:]).all()
    assert (prompts.numbered(0) == first).all()


def test_memory_is_measured_on_a_pool_that_is_full() -> None:
    assert 10 < bytes_a_block(20_000, 4, "sha256_cbor") < 1000
