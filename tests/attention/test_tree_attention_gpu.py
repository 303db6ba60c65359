"""The compiled work-list kernels on a device: `make gpu`. The interpreter has more cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefixcache.attention import paged_attention as paged_module
from prefixcache.attention.batch import PrefixSharing
from prefixcache.attention.decode import decode
from prefixcache.attention.selection import MIN_SAVED_BYTES_ON_GPU
from prefixcache.types import AttentionOptions
from tests.attention.on_device import on_device
from tests.attention.paged_cases import DTYPES, PagedCase, make_case
from tests.attention.shared_cases import Sharing, share, with_sharing
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.gpu

# Two conversations after one system prompt, drafts, a stranger, a chunk, an empty query.
CONTEXTS, QUERIES = [330, 400, 340, 170, 350, 140, 200], [1, 3, 2, 1, 1, 90, 0]
TRIE = [None, Sharing(0, 8), Sharing(0, 20), None, Sharing(1, 20), Sharing(0, 5), Sharing(1, 4)]


def run(case: PagedCase) -> torch.Tensor:
    there = on_device(case)
    return decode(there.q, there.cache, there.batch, there.options).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 7), (128, 4), (256, 8)])
def test_a_trie_equals_float64(dtype: torch.dtype, head_dim: int, group: int) -> None:
    case = make_case(
        CONTEXTS,
        QUERIES,
        num_kv_heads=1,
        group=group,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
    )
    case = share(case, TRIE)
    assert_close(run(case), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
def test_options_equal_float64(dtype: torch.dtype) -> None:
    options = AttentionOptions(
        soft_cap=3.0, alibi_slopes=(0.5, 0.125, -0.02, 0.0), sinks=(0.0, 2.5, -1.0, 1.0)
    )
    case = share(make_case(CONTEXTS, QUERIES, block_size=16, dtype=dtype, options=options), TRIE)
    assert_close(run(case), case.exact())


@pytest.mark.parametrize("num_sequences", [2, 16, 40])
def test_few_and_many_rows_of_one_run(num_sequences: int) -> None:
    """The narrow tiles and both wide ones of sm_90."""
    case = make_case(
        [513 + row for row in range(num_sequences)],
        [1] * num_sequences,
        num_kv_heads=1,
        group=4,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
    )
    case = share(case, [None] + [Sharing(0, 32)] * (num_sequences - 1))
    assert_close(run(case), case.exact())


def test_layers_of_a_step_use_one_uploaded_work_list() -> None:
    case = on_device(share(make_case(CONTEXTS, QUERIES, block_size=16), TRIE))
    first = decode(case.q, case.cache, case.batch, case.options)
    (work,) = (made for name, made in case.batch._derived.items() if name[0] == "tree_work")
    assert torch.equal(decode(case.q, case.cache, case.batch, case.options), first)
    assert work.block_tables.is_cuda


def test_shared_blocks_are_read_once_where_enough_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 heads of 128 elements of 2 bytes: 4 KiB a token."""
    calls = []
    tree_attention = paged_module.tree_attention
    monkeypatch.setattr(
        paged_module, "tree_attention", lambda *a: (calls.append(1), tree_attention(*a))
    )
    tokens = MIN_SAVED_BYTES_ON_GPU // 4096
    case = make_case(
        [tokens + 1, tokens + 1],
        [1, 1],
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
    )
    for num_blocks, expected in ((tokens // 16 - 1, 0), (tokens // 16, 1)):
        there = on_device(share(case, [None, Sharing(0, num_blocks)], PrefixSharing.AUTO))
        out = decode(there.q, there.cache, there.batch, there.options)
        assert len(calls) == expected
        flat = with_sharing(there, PrefixSharing.NEVER)
        torch.testing.assert_close(
            out, decode(flat.q, flat.cache, flat.batch, flat.options), rtol=2e-2, atol=1e-2
        )


def test_a_captured_graph_runs_the_same_work_list_again() -> None:
    case = share(make_case(CONTEXTS, QUERIES, block_size=16, dtype=torch.bfloat16), TRIE)
    there = on_device(case)
    arguments = (there.q, there.cache, there.batch, there.options)
    decode(*arguments)  # compiles, and uploads the work list
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(*arguments)
    there.q.mul_(-1.0)
    graph.replay()
    assert_close(out.cpu(), replace(case, q=-case.q).exact())
