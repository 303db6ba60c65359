"""Which tiles and splits a call gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention.selection import (
    LATENT_TABLES,
    TABLES,
    Rule,
    Shapes,
    architecture_of,
    choose_plan,
    choose_tree_plan,
    num_cores,
    padded_head_dim,
)

ARCHITECTURES = sorted(TABLES)
DECODE = Shapes(
    num_tokens=1,
    num_sequences=1,
    longest_query=1,
    max_seq_len=32768,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    stored=torch.bfloat16,
)
H200_CORES = 132


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    cores=st.integers(1, 300),
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=50),
    max_seq_len=st.integers(1, 10**6),
    num_kv_heads=st.integers(1, 40),
    group=st.integers(1, 200),
    head_dim=st.integers(1, 600),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    is_latent=st.booleans(),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_any_call_gets_a_plan_that_the_kernel_can_run(
    architecture: str,
    cores: int,
    lengths: list[int],
    group: int,
    num_kv_heads: int,
    **shapes: int,
) -> None:
    plan = choose_plan(
        Shapes(
            num_tokens=sum(lengths),
            num_sequences=len(lengths),
            longest_query=max(lengths),
            num_query_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            **shapes,
        ),
        architecture,
        cores,
    )
    tiles = plan.tiles
    assert all(map(is_power_of_two, (tiles.rows, tiles.keys, tiles.num_warps, plan.num_splits)))
    assert min(tiles.rows, tiles.keys) >= 16
    assert 1 <= plan.group_part <= min(group, tiles.rows)
    assert plan.min_split % tiles.keys == 0
    # Cutting further than the longest sequence gives nobody work.
    assert plan.num_splits == 1 or plan.min_split * plan.num_splits < 4 * shapes["max_seq_len"]


@pytest.mark.parametrize("tables", [TABLES, LATENT_TABLES], ids=["heads", "latents"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_entry_has_a_reason_and_the_last_one_takes_anything(
    architecture: str, tables: Mapping[str, tuple[Rule, ...]]
) -> None:
    rules = tables[architecture]
    assert all(rule.reason for rule in rules)
    last = rules[-1]
    assert (last.max_rows, last.max_head_dim, last.max_element_bytes) == (None, None, None)


def test_decode_takes_few_rows_and_prompts_take_many() -> None:
    prompt = replace(DECODE, num_tokens=4096, longest_query=4096)
    assert choose_plan(DECODE, "sm_90", H200_CORES).tiles.rows == 16
    assert choose_plan(prompt, "sm_90", H200_CORES).tiles.rows == 128


def test_a_lone_long_context_is_cut_for_all_cores_and_a_large_batch_is_not_cut() -> None:
    assert choose_plan(DECODE, "sm_90", H200_CORES).num_splits == 64
    large = replace(DECODE, num_tokens=256, num_sequences=256)
    assert choose_plan(large, "sm_90", H200_CORES).num_splits == 1


@pytest.mark.parametrize(
    ("max_seq_len", "num_splits"), [(1, 1), (256, 1), (257, 4), (1024, 4), (1025, 16)]
)
def test_short_contexts_are_not_cut_into_crumbs(max_seq_len: int, num_splits: int) -> None:
    short = replace(DECODE, max_seq_len=max_seq_len)
    assert choose_plan(short, "sm_90", H200_CORES).num_splits == num_splits


def test_few_kernels_serve_all_lengths() -> None:
    """Each plan is compiled when it is first met, which takes seconds."""
    plans = {
        choose_plan(replace(DECODE, max_seq_len=length), "sm_90", H200_CORES)
        for length in range(1, 200_000, 97)
    }
    assert len(plans) == 4


@pytest.mark.parametrize(("group", "group_part"), [(1, 1), (7, 7), (128, 128), (130, 65)])
def test_a_group_larger_than_the_rows_is_shared_out_evenly(group: int, group_part: int) -> None:
    shapes = replace(DECODE, num_query_heads=8 * group)
    assert choose_plan(shapes, "sm_90", H200_CORES).group_part == group_part


@pytest.mark.parametrize(
    ("num_heads", "tokens", "rows", "group_part"),
    [(16, 1, 16, 16), (32, 1, 32, 32), (128, 1, 64, 64), (16, 4, 64, 16), (40, 1, 64, 40)],
)
def test_heads_that_share_latents_share_the_rows_of_a_program(
    num_heads: int, tokens: int, rows: int, group_part: int
) -> None:
    """Tensor parallel parts of DeepSeek-V3, drafts, and a head count that is no power of two."""
    latent = replace(
        DECODE,
        num_query_heads=num_heads,
        num_kv_heads=1,
        head_dim=512,
        longest_query=tokens,
        is_latent=True,
    )
    plan = choose_plan(latent, "sm_90", H200_CORES)
    assert (plan.tiles.rows, plan.group_part) == (rows, group_part)


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (129, 256)]
)
def test_head_dims_are_padded_to_powers_of_two(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded


@pytest.mark.parametrize(
    ("hip", "capability", "architecture"),
    [
        (None, (8, 0), "sm_80"),
        (None, (8, 9), "sm_80"),
        (None, (9, 0), "sm_90"),
        (None, (10, 0), "sm_100"),
        (None, (12, 0), "sm_80"),
        ("7.0", (9, 4), "gfx942"),
    ],
)
def test_each_device_has_a_table(
    hip: str | None,
    capability: tuple[int, int],
    architecture: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    properties = SimpleNamespace(multi_processor_count=H200_CORES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    device = torch.device("cuda", 0)
    # Past the caches, which would keep what the test pretends.
    assert architecture_of.__wrapped__(device) == architecture
    assert num_cores.__wrapped__(device) == H200_CORES


def test_on_cpu_there_is_triton_s_interpreter() -> None:
    cpu = torch.device("cpu")
    assert (architecture_of(cpu), num_cores(cpu)) == ("interpreter", 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4, 7, 16, 40, 200])
def test_a_work_list_gets_tiles_and_limits_that_fit_them(
    architecture: str, dtype: torch.dtype, group: int
) -> None:
    shapes = replace(DECODE, num_query_heads=8 * group, dtype=dtype, stored=dtype)
    for most_queries in (1, 2, 64):
        plan = choose_tree_plan(shapes, most_queries, architecture, H200_CORES)
        launches = ((plan.narrow, plan.narrow_limits), (plan.wide, plan.wide_limits))
        for tiles, limits in launches:
            assert 1 <= limits.num_queries * tiles.group_part(group) <= tiles.rows
            assert limits.min_keys % limits.key_step == 0
            assert limits.key_step == tiles.keys
            assert limits.num_items >= 1
        assert plan.max_narrow_queries * group <= plan.narrow.rows
        assert plan.wide.rows >= plan.narrow.rows


def test_many_queries_of_one_run_take_wide_tiles() -> None:
    plan = choose_tree_plan(DECODE, 64, "sm_90", H200_CORES)
    assert (plan.narrow.rows, plan.wide.rows) == (16, 128)
    assert plan.max_narrow_queries == 4
