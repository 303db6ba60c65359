"""`--peer vllm`: in the same rounds where it can be imported, a note where it cannot."""

from __future__ import annotations

import sys

import pytest

from prefixcache.bench.vllm_peer import ALGORITHMS, PeerMissingError, load_vllm
from tests.bench.run_bench import EDGE, EDGE_SIZES, TINY_CORE, report_of, rows_named, run_bench
from tests.bench.vllm_stub import stub_modules


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.usefixtures("vllm")
def test_core_measures_its_calls_in_the_same_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, *TINY_CORE, "--algorithms", "sha256_cbor", "--peer", "vllm")
    assert report["notes"] == []
    for recipe in ALGORITHMS:
        name = f"vllm {recipe}"
        for call in ("hash", "lookup", "hash + lookup", "allocate, cached", "free"):
            row, *_ = rows_named(report, call, algorithm=name, tokens=100)
            assert row["count"] in (2, 4)  # free is called for both prompts
            assert row["ratios"] == {}
    for call, labels in (
        ("hash + lookup", {"tokens": 100}),
        ("allocate + commit, new", {"tokens": 33}),
        ("append + commit, 1 token a row", {"rows": 64}),
        ("append + commit, 1 token a row", {"rows": 1}),
    ):
        (own,) = rows_named(report, call, algorithm="sha256_cbor", **labels)
        (peer,) = rows_named(report, call, algorithm="vllm sha256_cbor", **labels)
        assert own["count"] == peer["count"]
        ratio = own["median_s"] / peer["median_s"]
        assert own["ratios"]["vllm"] == pytest.approx(ratio, rel=1e-4)
    own, peer = rows_named(report, "make a pool", blocks=3000)
    assert peer["algorithm"] == "vllm"
    assert own["ratios"].keys() == {"vllm"}


@pytest.mark.usefixtures("vllm")
def test_replay_measures_it_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("replay", EDGE, *EDGE_SIZES, "--rounds", "1", "--requests", "50", "--peer", "vllm")
    report = report_of(capsys, *arguments)
    peer, *_ = rows_named(report, "vllm sha256_cbor")
    for recipe in ("sha256_cbor", "xxhash_cbor"):
        own, *_ = rows_named(report, recipe)
        assert own["query_blocks"] == peer["query_blocks"]
        assert 0 < peer["hit_blocks"] <= own["hit_blocks"]  # it recomputes the last block of all
        assert own["target"]["of"] == "vllm"
        assert own["target"]["met"] is (own["ratios"]["vllm"] <= own["target"]["at_most"])


@pytest.mark.usefixtures("no_vllm")
def test_without_it_a_line_says_so_and_the_rest_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = run_bench(capsys, *TINY_CORE, "--algorithms", "xxh3", "--peer", "vllm")
    (line,) = [line for line in text.splitlines() if "not importable" in line]
    assert "vllm" in line
    assert "hash + lookup" in text


def test_a_release_without_what_is_used_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = stub_modules()
    del modules["vllm.v1.core.kv_cache_manager"].KVCacheManager
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(PeerMissingError, match="KVCacheManager"):
        load_vllm()
