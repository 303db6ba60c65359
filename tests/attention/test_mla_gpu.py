"""The compiled kernel for latents on a device: `make gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefixcache.attention.decode import decode
from prefixcache.attention.device_batch import DeviceBatch, upload
from prefixcache.attention.paged_attention import launch
from prefixcache.attention.prefill import prefill
from prefixcache.attention.selection import LATENT_TABLES, Plan, architecture_of
from prefixcache.types import AttentionOptions
from tests.attention.on_device import DEVICE, on_device
from tests.attention.paged_cases import DTYPES, OPTIONS, make_latent_case
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.gpu
R, P = 512, 64


@pytest.mark.parametrize("launcher", [prefill, decode])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [5, 16, 40, 128])
def test_a_mixed_batch_equals_float64(launcher, dtype: torch.dtype, num_heads: int) -> None:
    """Prompt, chunk, single tokens, drafts; float32 too: its products are not rounded to TF32."""
    case = make_latent_case(
        [0, 5, 300, 0, 64, 0],
        [40, 1, 1, 0, 3, 9],
        num_query_heads=num_heads,
        latent_dim=R,
        rope_dim=P,
        block_size=16,
        dtype=dtype,
    )
    there = on_device(case)
    out = launcher(there.q, there.cache, there.batch, there.options)
    assert_close(out.cpu(), case.exact())


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(256, 32), (300, 0), (1024, 40)])
def test_latents_of_other_sizes(latent_dim: int, rope_dim: int) -> None:
    case = make_latent_case(
        [0, 130], [9, 1], latent_dim=latent_dim, rope_dim=rope_dim, dtype=torch.float16
    )
    there = on_device(case)
    out = decode(there.q, there.cache, there.batch, there.options)
    assert_close(out.cpu(), case.exact())


@pytest.mark.parametrize("num_splits", [1, 16])
def test_every_entry_of_the_devices_table_equals_float64(num_splits: int) -> None:
    for rule in LATENT_TABLES[architecture_of(DEVICE)]:
        dtype = torch.float32 if rule.max_element_bytes == 4 else torch.bfloat16
        case = make_latent_case(
            [0, 900],
            [40, 3],
            num_query_heads=5,
            latent_dim=rule.max_head_dim or 1024,
            rope_dim=P,
            block_size=16,
            dtype=dtype,
        )
        there = on_device(case)
        plan = Plan(rule.tiles, 5, num_splits, rule.tiles.keys)
        out = there.q.new_full((*there.q.shape[:2], case.cache.values.shape[3]), torch.nan)
        batch = upload(there.batch, DEVICE)
        launch(there.q, there.cache, batch, there.options, plan, out)
        assert_close(out.cpu(), case.exact())


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options = replace(OPTIONS[name], scale=(R // 2 + P) ** -0.5)
    case = make_latent_case(
        [300, 0], [1, 20], latent_dim=R, rope_dim=P, dtype=torch.bfloat16, options=options
    )
    there = on_device(case)
    out = decode(there.q, there.cache, there.batch, there.options)
    assert_close(out.cpu(), case.exact())
    plain = replace(case, options=AttentionOptions(scale=options.scale))
    assert not torch.allclose(out.cpu().double(), plain.exact(), atol=1e-2)


def test_a_captured_graph_serves_other_lengths() -> None:
    """The grid depends on no length, and nothing waits for the device."""
    case = make_latent_case(
        [300, 0, 19], [1, 1, 4], latent_dim=R, rope_dim=P, block_size=16, dtype=torch.bfloat16
    )
    there = on_device(case)
    wanted = upload(there.batch, DEVICE)
    # Captured while every sequence has other lengths, and blocks that are right for them.
    batch = DeviceBatch(
        torch.zeros_like(wanted.block_tables),
        torch.tensor([0, 4, 5, 6], dtype=torch.int32, device=DEVICE),
        torch.tensor([4, 16, 200], dtype=torch.int32, device=DEVICE),
    )
    plan = Plan(LATENT_TABLES[architecture_of(DEVICE)][0].tiles, 4, 4, 64)
    out = there.q.new_empty(*there.q.shape[:2], R)
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
