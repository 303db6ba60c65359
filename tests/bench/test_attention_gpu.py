"""`prefixcache bench attention` on a device: `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixcache.bench.attention import bench_attention, gpu_settings, quick
from prefixcache.bench.measure import Rounds
from prefixcache.bench.report import to_json
from prefixcache.bench.tune import TuneSettings, tune
from tests.bench.run_bench import rows_named

pytestmark = pytest.mark.gpu


def test_kernels_are_timed_beside_the_devices_ceilings() -> None:
    report = to_json(bench_attention(quick(gpu_settings()), lambda step, share: None))
    decode, rate = rows_named(report, "decode")
    assert 0 < decode["min_s"] <= decode["median_s"]
    assert rate["ratios"]["copy"] > 0
    prefill, rate = rows_named(report, "prefill")
    assert prefill["ratios"]["SDPA on contiguous tensors"] > 0
    assert rate["ratios"]["matmul"] > 0
    for name in ("tree", "write_kv", "copy_blocks", "decode over latents", "decode, 1-byte K/V"):
        assert rows_named(report, name)


def test_tiles_of_every_rule_are_timed() -> None:
    settings = replace(
        TuneSettings(),
        num_kv_heads=1,
        sequences=2,
        context=64,
        new=32,
        cached=32,
        keys=(32,),
        num_warps=(4,),
        num_stages=(2,),
        rounds=Rounds.exactly(1),
    )
    report = tune(settings, lambda step, share: None)
    assert all(row.summary.min > 0 for row in report.rows)
    assert any(note.startswith("Rule(") for note in report.notes)
