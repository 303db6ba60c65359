"""The compiled kernel on a device: `make gpu`. Its cases under the interpreter are more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from prefixcache.attention.decode import decode
from prefixcache.attention.device_batch import DeviceBatch, upload
from prefixcache.attention.paged_attention import launch
from prefixcache.attention.prefill import prefill
from prefixcache.attention.selection import TABLES, Plan, Rule, architecture_of
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions
from tests.attention.kernel_runs import run
from tests.attention.on_device import DEVICE, on_device
from tests.attention.paged_cases import DTYPES, OPTIONS, STORED, PagedCase, Stored, make_case
from tests.support.tolerances import assert_close, is_close

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize("launcher", [prefill, decode])
CONTEXTS, QUERIES = [0, 5, 300, 0, 700, 64, 0], [90, 1, 0, 1, 1, 5, 33]
Launcher = Callable[..., torch.Tensor]


def attended(launcher: Launcher, case: PagedCase) -> torch.Tensor:
    there = on_device(case)
    return launcher(there.q, there.cache, there.batch, there.options).cpu()


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 7), (128, 4), (256, 8)])
def test_a_mixed_batch_equals_float64(
    launcher: Launcher, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    """float32 too: its products are not rounded to TF32."""
    case = make_case(
        CONTEXTS,
        QUERIES,
        num_kv_heads=1,
        group=group,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
    )
    assert_close(attended(launcher, case), case.exact())


def test_the_tolerance_of_float32_tells_it_from_tf32() -> None:
    """A mantissa of 10 bits in q and K is far outside."""
    case = make_case([300], [3], num_kv_heads=1, head_dim=64, block_size=16)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return (((tensor.view(torch.int32) + 0x1000) >> 13) << 13).view(torch.float32)

    coarse = replace(
        case, q=rounded(case.q), cache=replace(case.cache, keys=rounded(case.cache.keys))
    )
    assert not is_close(coarse.exact().float(), case.exact())


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*OPTIONS, "long window"])
def test_options_alone_and_together(launcher: Launcher, name: str, dtype: torch.dtype) -> None:
    options = OPTIONS.get(name, AttentionOptions(window=200))
    case = make_case(CONTEXTS, QUERIES, head_dim=64, block_size=16, dtype=dtype, options=options)
    assert_close(attended(launcher, case), case.exact())


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.usefixtures("float8_way")
def test_quantised_caches(launcher: Launcher, stored: Stored, dtype: torch.dtype) -> None:
    case = make_case(CONTEXTS, QUERIES, head_dim=128, block_size=16, dtype=dtype, **stored)
    assert_close(attended(launcher, case), case.exact())


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_all_options_over_quantised_caches_with_and_without_splits(
    stored: Stored, num_splits: int
) -> None:
    case = make_case(
        CONTEXTS,
        QUERIES,
        head_dim=80,
        block_size=16,
        dtype=torch.bfloat16,
        options=replace(OPTIONS["all"], window=150, scale=-0.1),
        **stored,
    )
    assert_close(run(on_device(case), keys=32, num_splits=num_splits).cpu(), case.exact())


def limits_of(rule: Rule) -> tuple[torch.dtype, int, Stored]:
    dtype = torch.float32 if rule.max_element_bytes == 4 else torch.bfloat16
    stored = STORED[0] if rule.max_stored_bytes == 1 else Stored()
    return dtype, rule.max_head_dim or 512, stored


@pytest.mark.parametrize("num_splits", [1, 16])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_every_entry_of_the_devices_table_equals_float64(name: str, num_splits: int) -> None:
    for rule in TABLES[architecture_of(DEVICE)]:
        dtype, head_dim, stored = limits_of(rule)
        case = make_case(
            [0, 900],
            [40, 3],
            head_dim=head_dim,
            block_size=16,
            dtype=dtype,
            options=OPTIONS.get(name),
            **stored,
        )
        there = on_device(case)
        plan = Plan(rule.tiles, 2, num_splits, rule.tiles.keys)
        out = torch.full_like(there.q, torch.nan)
        batch = upload(there.batch, DEVICE)
        launch(there.q, there.cache, batch, there.options, plan, out)
        assert_close(out.cpu(), case.exact())


@pytest.mark.parametrize("stored", [Stored(), STORED[0]], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_captured_graph_serves_other_lengths(name: str, stored: Stored) -> None:
    """The grid depends on no length, and nothing waits for the device."""
    case = make_case(
        [300, 0, 19],
        [1, 1, 4],
        block_size=16,
        dtype=torch.bfloat16,
        options=OPTIONS.get(name),
        **stored,
    )
    there = on_device(case)
    wanted = upload(there.batch, DEVICE)
    # Captured while every sequence has other lengths, and blocks that are right for them.
    batch = DeviceBatch(
        torch.zeros_like(wanted.block_tables),
        torch.tensor([0, 4, 5, 6], dtype=torch.int32, device=DEVICE),
        torch.tensor([4, 16, 200], dtype=torch.int32, device=DEVICE),
    )
    plan = Plan(TABLES[architecture_of(DEVICE)][0].tiles, 2, 4, 64)
    out = torch.empty_like(there.q)
    arguments = (there.q, there.cache, batch, there.options, plan, out)
    launch(*arguments)  # compiles, and uploads slopes and sinks
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*arguments)

    batch.block_tables.copy_(wanted.block_tables)
    batch.query_start.copy_(wanted.query_start)
    batch.seq_lens.copy_(wanted.seq_lens)
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out.cpu(), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_block_is_far_outside_the_tolerance(dtype: torch.dtype) -> None:
    case = make_case([255], [1], num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype)
    tables = case.batch.block_tables.copy()
    tables[0, [3, 4]] = tables[0, [5, 5]]
    wrong = replace(case, batch=replace(case.batch, block_tables=tables))
    exact = case.exact()
    assert is_close(attended(decode, case), exact)
    assert not is_close(attended(decode, wrong), exact)


def test_blocks_beyond_4_gib_are_read_like_the_first_ones() -> None:
    """Also from K/V of one byte, of which 2**32 lie before them."""
    case = make_case(
        [40], [3], head_dim=128, block_size=16, dtype=torch.bfloat16, stored=torch.float8_e4m3fn
    )
    there = on_device(case)
    keys = there.cache.keys
    block_bytes = 2 * keys[0].numel()
    pool = torch.empty(
        (2**32 // block_bytes + len(keys), 2, *keys.shape[1:]), dtype=keys.dtype, device=DEVICE
    )
    first = len(pool) - len(keys)
    assert pool[:first].numel() >= 2**32 - block_bytes
    pool[first:, 0], pool[first:, 1] = keys, there.cache.values
    scales = there.cache.scales
    key_scales, value_scales = (
        torch.cat([torch.full((first, *part.shape[1:]), torch.nan, device=DEVICE), part])
        for part in (scales.keys, scales.values)
    )
    far = KVCache(pool[:, 0], pool[:, 1], replace(scales, keys=key_scales, values=value_scales))
    batch = replace(there.batch, block_tables=there.batch.block_tables + first)
    out = decode(there.q, far, batch, there.options)
    assert torch.equal(out, decode(there.q, there.cache, there.batch, there.options))
    assert_close(out.cpu(), case.exact())
