"""The work-list kernel and the joining of its parts in the interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention import paged_attention as paged_module
from prefixcache.attention import selection
from prefixcache.attention.batch import PrefixSharing
from prefixcache.attention.decode import decode
from prefixcache.attention.selection import Tiles, TreePlan
from prefixcache.attention.tree_attention import launch_tree, upload_work
from prefixcache.attention.tree_work import ItemLimits
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import DTYPES, OPTIONS, STORED, PagedCase, Stored, make_case
from tests.attention.shared_cases import Sharing, share, sharings, with_sharing
from tests.support.kernel_memory import addresses, watched
from tests.support.tolerances import assert_close, is_close

# NaN out of -inf - -inf, or out of 0 * inf, shows even where it is dropped later.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# A system prompt of 3 blocks; two conversations go on for 5 more; a stranger; an empty query.
CONTEXTS, QUERIES = [33, 40, 34, 17, 35, 14, 20], [1, 3, 2, 1, 1, 18, 0]
TRIE = [None, Sharing(0, 3), Sharing(0, 8), None, Sharing(1, 8), Sharing(0, 3), Sharing(1, 4)]


def plan_of(case: PagedCase, narrow: Tiles, wide: Tiles, num_items: int) -> TreePlan:
    group = case.q.shape[1] // case.cache.keys.shape[1]
    limits = [
        ItemLimits(tiles.rows // tiles.group_part(group), tiles.keys, tiles.keys, num_items)
        for tiles in (narrow, wide)
    ]
    return TreePlan(narrow, wide, limits[0], limits[1], narrow.rows // group)


def run(
    case: PagedCase, *, narrow_rows: int = 16, wide_rows: int = 32, num_items: int = 4
) -> torch.Tensor:
    """The kernels with such tiles, into memory full of NaN."""
    narrow, wide = Tiles(narrow_rows, 16, 1, 1), Tiles(wide_rows, 16, 1, 1)
    plan = plan_of(case, narrow, wide, num_items)
    prefix = case.batch.shared_prefix(case.block_size)
    assert prefix is not None
    out = torch.full_like(case.q, torch.nan)
    work = upload_work(case.batch, prefix, plan, case.q.device)
    launch_tree(case.q, case.cache, work, case.options, plan, out)
    return out


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(4, 40), st.integers(1, 18)), min_size=2, max_size=5),
    data=st.data(),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([8, 20, 32]),
    block_size=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, None, -0.1, 0.0]),
    num_items=st.sampled_from([1, 4, 100]),
    seed=st.integers(0, 2**16),
)
def test_any_trie_equals_float64_with_nan_in_every_unused_slot(
    lengths: list[tuple[int, int]], data: st.DataObject, num_items: int, **dimensions: int
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    queries[:2] = [1, 2]
    trie = data.draw(sharings(len(lengths)))
    trie[1] = Sharing(0, 2)  # so that there is a plan
    case = share(make_case(contexts, queries, **dimensions), trie)
    assert_close(run(case, num_items=num_items), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_items", [1, 100])
def test_a_trie_of_three_levels(dtype: torch.dtype, num_items: int) -> None:
    case = share(make_case(CONTEXTS, QUERIES, dtype=dtype), TRIE)
    assert_close(run(case, num_items=num_items), case.exact())


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].window is None])
def test_options(name: str) -> None:
    case = share(make_case(CONTEXTS, QUERIES, options=OPTIONS[name]), TRIE)
    out = run(case)
    assert_close(out, case.exact())
    assert not is_close(out, replace(case, options=AttentionOptions()).exact())


EVERY_OPTION = AttentionOptions(
    scale=0.4, soft_cap=2.0, alibi_slopes=(0.5, 0.0, -0.1, 0.02), sinks=(0.0, 3.0, -20.0, 1.0)
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_quantised_caches(stored: Stored, dtype: torch.dtype) -> None:
    case = make_case(CONTEXTS, QUERIES, dtype=dtype, options=EVERY_OPTION, **stored)
    case = share(case, TRIE)
    assert_close(run(case), case.exact())


@pytest.mark.parametrize(("narrow_rows", "wide_rows"), [(16, 16), (16, 64), (32, 16)])
@pytest.mark.parametrize("group", [1, 5, 16, 20, 40])
def test_groups_that_fill_the_rows_leave_some_over_or_take_several_programs(
    group: int, narrow_rows: int, wide_rows: int
) -> None:
    case = make_case([17, 18, 9], [3, 1, 1], num_kv_heads=1, group=group)
    case = share(case, [None, Sharing(0, 4), Sharing(0, 2)])
    assert_close(run(case, narrow_rows=narrow_rows, wide_rows=wide_rows), case.exact())


@pytest.mark.parametrize("block_size", [1, 13, 16, 32])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int) -> None:
    """Runs end inside tiles and at their ends."""
    contexts = [3 * block_size + 1, 2 * block_size, 3 * block_size]
    case = make_case(contexts, [1, 2, 1], num_kv_heads=1, block_size=block_size)
    case = share(case, [None, Sharing(0, 2), Sharing(0, 3)])
    assert_close(run(case, num_items=8), case.exact())


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), 6e4])
def test_unused_slots_never_show_whatever_they_hold(poison: float) -> None:
    poisoned = share(make_case(CONTEXTS, QUERIES, poison=poison), TRIE)
    clean = share(make_case(CONTEXTS, QUERIES, poison=0.0), TRIE)
    assert torch.equal(run(poisoned), run(clean))


@pytest.mark.parametrize("tail", [-1, 2**30])
def test_entries_past_a_sequences_last_block_are_never_read(tail: int) -> None:
    """An id beyond the pool would end the process: the interpreter reads real addresses."""
    case = share(make_case(CONTEXTS, QUERIES), TRIE)
    tables = np.full((len(QUERIES), 20), tail, dtype=np.int32)
    for row, table in enumerate(case.tables):
        tables[row, : len(table)] = table
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(dirty), run(case))


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_scores_do_not_overflow(scale: float) -> None:
    case = share(make_case(CONTEXTS, QUERIES, scale=scale), TRIE)
    assert_close(run(case), case.exact())


def test_queries_may_be_a_strided_view() -> None:
    case = share(make_case(CONTEXTS, QUERIES), TRIE)
    fused = torch.cat([case.q, case.q], dim=1)[:, : case.q.shape[1]]
    assert not fused.is_contiguous()
    assert torch.equal(run(replace(case, q=fused)), run(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_block_of_a_run_is_far_outside_the_tolerance(dtype: torch.dtype) -> None:
    case = make_case([255, 252], [1, 1], num_kv_heads=1, block_size=16, dtype=dtype)
    case = share(case, [None, Sharing(0, 15)])
    tables = case.batch.block_tables.copy()
    tables[:, 3] = tables[0, 5]
    wrong = replace(case, batch=replace(case.batch, block_tables=tables))
    exact = case.exact()
    assert is_close(run(case), exact)
    for row in (slice(0, 1), slice(1, 2)):
        assert not is_close(run(wrong)[row], exact[row])


def test_of_the_pool_what_is_used_is_read_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And all outputs are written, none of them twice."""
    case = share(make_case(CONTEXTS, QUERIES, head_dim=20, block_size=3, group=3), TRIE)
    accesses = watched(monkeypatch)
    out = run(case)
    assert len(set(accesses.written)) == len(accesses.written)  # no two programs race
    assert set(accesses.written) >= addresses(out)
    used = set[int]()
    for row, num_tokens in enumerate(case.batch.seq_lens.tolist()):
        if QUERIES[row] > 0:
            for position in range(num_tokens):
                block, offset = case.tables[row][position // 3], position % 3
                used |= addresses(case.cache.keys[block, :, offset])
                used |= addresses(case.cache.values[block, :, offset])
    pool = addresses(case.cache.keys) | addresses(case.cache.values)
    assert set(accesses.read) & pool == used


def test_the_launcher_takes_it_where_blocks_are_shared_and_makes_the_work_list_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    tree_attention = paged_module.tree_attention
    monkeypatch.setattr(
        paged_module, "tree_attention", lambda *a: (calls.append(a), tree_attention(*a))
    )
    case = share(make_case(CONTEXTS, QUERIES), TRIE)
    for _layer in range(2):
        assert_close(decode(case.q, case.cache, case.batch, case.options), case.exact())
    assert len(calls) == 2
    assert sum(name[0] == "tree_work" for name in case.batch._derived) == 1

    flat = with_sharing(case, PrefixSharing.NEVER)
    window = replace(case, options=AttentionOptions(window=5))
    alone = share(make_case(CONTEXTS, QUERIES), [None] * len(QUERIES))
    for other in (flat, window, alone):
        assert_close(decode(other.q, other.cache, other.batch, other.options), other.exact())
    assert len(calls) == 2


def test_it_is_taken_by_itself_where_enough_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(paged_module, "tree_attention", lambda *_: calls.append(1))
    case = share(make_case([129, 130], [1, 1]), [None, Sharing(0, 32)], PrefixSharing.AUTO)
    saved = 2 * 2 * 128 * 16 * 4
    for least, expected in ((saved + 1, 0), (saved, 1)):
        monkeypatch.setattr(selection, "MIN_SAVED_BYTES", least)
        decode(case.q, case.cache, case.batch, case.options)
        assert len(calls) == expected
