"""The compiled kernel on a device: `make test-gpu`. Its cases under the interpreter are more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefixcache.attention.decode import decode
from prefixcache.attention.device_batch import DeviceBatch, upload
from prefixcache.attention.paged_attention import launch
from prefixcache.attention.prefill import prefill
from prefixcache.attention.selection import TABLES, Plan, architecture_of, padded_head_dim
from prefixcache.storage.kv_cache import KVCache
from tests.attention.paged_cases import DTYPES, PagedCase, make_case
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
CONTEXTS, QUERIES = [0, 5, 300, 0, 700, 64, 0], [90, 1, 0, 1, 1, 5, 33]


def on_device(case: PagedCase) -> PagedCase:
    """The caches stay views of one pool, poison included."""
    pool = case.cache.keys._base
    assert pool is not None
    pool = pool.to(DEVICE)
    return replace(case, q=case.q.to(DEVICE), cache=KVCache(pool[:, 1, 0], pool[:, 1, 1]))


@pytest.mark.parametrize("launcher", [prefill, decode])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 7), (128, 4), (256, 8)])
def test_a_mixed_batch_equals_float64(
    launcher, dtype: torch.dtype, head_dim: int, group: int
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
    there = on_device(case)
    out = launcher(there.q, there.cache, there.batch, there.options)
    assert_close(out.cpu(), case.exact())


@pytest.mark.parametrize("num_splits", [1, 16])
def test_every_entry_of_the_devices_table_equals_float64(num_splits: int) -> None:
    for rule in TABLES[architecture_of(DEVICE)]:
        dtype = torch.float32 if rule.max_element_bytes == 4 else torch.bfloat16
        head_dim = rule.max_head_dim or 512
        assert padded_head_dim(head_dim) == head_dim
        case = make_case(
            [0, 900], [40, 3], num_kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype
        )
        there = on_device(case)
        plan = Plan(rule.tiles, 2, num_splits, rule.tiles.keys)
        out = torch.full_like(there.q, torch.nan)
        batch = upload(there.batch, DEVICE)
        launch(there.q, there.cache, batch, there.options, plan, out)
        assert_close(out.cpu(), case.exact())


def test_a_captured_graph_serves_other_lengths() -> None:
    """The grid depends on no length, and nothing waits for the device."""
    case = make_case([300, 0, 19], [1, 1, 4], block_size=16, dtype=torch.bfloat16)
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
    launch(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*arguments)

    batch.block_tables.copy_(wanted.block_tables)
    batch.query_start.copy_(wanted.query_start)
    batch.seq_lens.copy_(wanted.seq_lens)
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out.cpu(), case.exact())
