"""`prefixcache bench attention` on a CPU, with tiny sizes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from prefixcache.bench.attached_cases import ATTACHED, PRIVATE, attached_case
from prefixcache.bench.attention import bench_attention, cpu_settings, gpu_settings, quick
from prefixcache.bench.attention_cases import (
    Case,
    Heads,
    Latents,
    decode_case,
    latent_case,
    move_case,
    prefill_case,
    quantized_case,
    shared_case,
)
from prefixcache.bench.report import to_json
from tests.bench.run_bench import rows_named, run_bench
from tests.support.tolerances import assert_close

HEADS = Heads(num_kv_heads=2, group=3, head_dim=16, block_size=4)


def results_of(case: Case) -> dict[str, Any]:
    return {operation.name: operation.call() for operation in case.operations}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """With the sizes of a GPU's settings shrunk, all of it on the CPU."""
    settings = quick(replace(gpu_settings(), device="cpu", dtypes=("float32", "bfloat16")))
    return to_json(bench_attention(settings, lambda step, share: None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_compared_computes_the_same(dtype: str) -> None:
    found = results_of(decode_case(HEADS, dtype, 3, 10, "cpu"))
    assert_close(found["gather + SDPA"][:, :, 0], found["decode"].double())
    found = results_of(prefill_case(HEADS, dtype, 7, 6, "cpu"))
    peer = found["SDPA on contiguous tensors"][0].transpose(0, 1)
    assert_close(peer, found["prefill"].double())
    found = results_of(shared_case(HEADS, dtype, 3, 8, 3, "cpu"))
    assert_close(found["tree"], found["flat"].double())


def test_one_byte_and_latent_decode_read_the_bytes_of_their_caches() -> None:
    case = quantized_case(HEADS, "float32", 3, 8, "cpu")
    found = results_of(case)
    assert found["decode, 1-byte K/V"].shape == (3, 6, 16)
    assert {operation.num_bytes for operation in case.operations} == {2 * 3 * 8 * 2 * 16}
    latents = Latents(num_heads=4, latent_dim=8, rope_dim=2, block_size=4)
    case = latent_case(latents, "float32", 3, 8, "cpu")
    assert results_of(case)["decode over latents"].shape == (3, 4, 8)
    read, decode = case.operations
    assert read.num_bytes == decode.num_bytes == 3 * 8 * (8 + 2) * 4
    assert decode.flops == 2 * (8 + 2 + 8) * 4 * 3 * 8


def test_the_plan_of_a_step_finds_what_is_shared() -> None:
    found = results_of(shared_case(HEADS, "float32", 40, 200, 3, "cpu"))
    plan = found["plan of a step"]
    assert plan is not None
    assert plan.saved_tokens == 39 * 200


def test_moves_run_and_their_bytes_are_read_and_written() -> None:
    case = move_case(HEADS, "float32", 8, "cpu")
    results_of(case)
    # K and V, 8 tokens of 2 heads of 16 elements of 4 bytes, read and written.
    assert {operation.num_bytes for operation in case.operations} == {2 * 2 * 8 * 2 * 16 * 4}


def test_work_counts_every_pair_of_tokens_that_see_each_other() -> None:
    case = prefill_case(HEADS, "float32", 2, 3, "cpu")
    pairs = 4 + 5
    for operation in case.operations:
        assert operation.flops == pairs * 2 * (2 * 16) * (2 * 3)


def test_times_have_ratios_to_their_floor_and_rates_to_the_ceilings(report: dict[str, Any]) -> None:
    copies = rows_named(report, "copy")
    assert [("median_s" in row, "median_tb_per_s" in row) for row in copies] == [
        (True, False),
        (False, True),
    ]
    for dtype in ("float32", "bfloat16"):
        floor, *_ = rows_named(report, "read all K/V", dtype=dtype)
        decode, rate = rows_named(report, "decode", dtype=dtype)
        ratio = decode["median_s"] / floor["median_s"]
        assert decode["ratios"]["read all K/V"] == pytest.approx(ratio, rel=1e-4)
        share = rate["median_tb_per_s"] / copies[1]["median_tb_per_s"]
        assert rate["ratios"]["copy"] == pytest.approx(share, rel=1e-4)
        prefill, rate = rows_named(report, "prefill", dtype=dtype)
        assert prefill["ratios"]["SDPA on contiguous tensors"] > 0
        assert rate["ratios"]["matmul"] > 0
        tree, _ = rows_named(report, "tree", dtype=dtype)
        assert tree["ratios"]["flat"] > 0
        for name in ("write_kv", "copy_blocks"):
            _, rate = rows_named(report, name, dtype=dtype)
            assert rate["median_tb_per_s"] > 0


def test_the_command_shows_one_thread_and_all_and_leaves_torchs_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = torch.get_num_threads()
    text = run_bench(capsys, "attention", "--quick")
    assert torch.get_num_threads() == before
    assert "<= 2x read all K/V" in text
    assert "GB/s" in text
    assert "GFLOP/s" in text
    assert len(cpu_settings().threads) <= 2


def test_an_attached_view_computes_what_private_memory_gives() -> None:
    with ExitStack() as opened:
        case = attached_case(HEADS, "float32", 3, 10, "cpu", 2, opened)
        results = results_of(case), results_of(case)
    for found in results:
        assert torch.equal(found[ATTACHED], found[PRIVATE])
