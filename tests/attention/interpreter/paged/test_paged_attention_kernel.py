"""The kernel against float64, with every slot that holds no token poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention import decode as decode_module
from prefixcache.attention import prefill as prefill_module
from prefixcache.attention.device_batch import upload
from prefixcache.attention.paged_attention import launch, paged_attention
from prefixcache.attention.selection import Plan, Tiles
from prefixcache.types import AttentionOptions
from tests.attention.kernel_runs import run
from tests.attention.paged_cases import DTYPES, STORED, Stored, make_case
from tests.attention.test_large_pools import sparse_bytes
from tests.support.kernel_memory import addresses, watched
from tests.support.tolerances import assert_close, is_close

# NaN out of -inf - -inf, or out of 0 * inf, shows even where it is dropped later.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# Crosses block ends; one token, an empty query, full blocks, long context with one token.
CONTEXTS, QUERIES = [0, 5, 4, 0, 33, 7, 0], [9, 1, 0, 1, 1, 5, 8]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7, 8]),
    head_dim=st.sampled_from([8, 20, 32, 80]),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, None, -0.1, 0.0]),
    num_splits=st.sampled_from([1, 1, 2, 4]),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_float64_with_nan_in_every_unused_slot(
    lengths: list[tuple[int, int]], num_splits: int, seed: int, **dimensions: int
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    if sum(queries) == 0:
        queries[0] = 1
    case = make_case(contexts, queries, seed=seed, **dimensions)
    assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_head_dims_of_real_models(head_dim: int, dtype: torch.dtype) -> None:
    """Powers of two and others, which are padded."""
    case = make_case([20], [3], num_kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype)
    assert_close(run(case), case.exact())


@pytest.mark.parametrize(
    ("group", "group_part"),
    [(1, 1), (7, 7), (5, 5), (16, 16), (20, 10), (23, 12), (71, 15)],
)
def test_groups_that_fill_the_rows_leave_some_over_or_take_several_programs(
    group: int, group_part: int
) -> None:
    case = make_case([4, 17], [3, 1], group=group, block_size=8)
    assert_close(run(case, group_part=group_part), case.exact())


@pytest.mark.parametrize("block_size", [1, 2, 8, 13, 16, 32, 64, 128])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int) -> None:
    """One token, full tiles, full blocks and one less and more of each."""
    lengths = sorted({1, 15, 16, 17, 33, max(1, block_size - 1), block_size, block_size + 1})
    case = make_case(
        [length - 1 for length in lengths],
        [1] * len(lengths),
        num_kv_heads=1,
        block_size=block_size,
    )
    assert_close(run(case, num_splits=2), case.exact())


@pytest.mark.parametrize("keys", [16, 32, 64])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 7])
def test_tiles_of_any_shape(rows: int, keys: int, group: int) -> None:
    case = make_case([0, 40, 64, 3], [33, 18, 1, 0], num_kv_heads=1, group=group, block_size=8)
    assert_close(run(case, rows=rows, keys=keys), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_splits_with_and_without_keys(num_splits: int, dtype: torch.dtype) -> None:
    """A context for all 8 splits, for some, for one; chunks whose first rows see fewer splits."""
    case = make_case([127, 40, 0, 0, 30], [1, 2, 1, 0, 20], num_kv_heads=1, dtype=dtype)
    assert_close(run(case, num_splits=num_splits), case.exact())


def test_a_row_without_keys_in_a_split_weighs_nothing_however_low_the_other_scores_are() -> None:
    """Positions 14 and 15 see no key of the second split, which starts at 16."""
    case = make_case([14], [10], num_kv_heads=1, group=1, poison=0.0, scale=1e3)
    case.cache.keys.abs_()
    case.q.abs_().neg_()
    assert_close(run(case, num_splits=2), case.exact())


def test_as_many_splits_as_there_can_be() -> None:
    case = make_case([300, 0], [1, 1], num_kv_heads=1, group=1, block_size=16)
    assert_close(run(case, num_splits=64), case.exact())


def test_runs_are_not_cut_below_the_least_length() -> None:
    case = make_case([60, 70], [3, 1])
    few = run(case, num_splits=2, min_split=32)
    assert_close(few, case.exact())
    # 64 and 71 keys are two runs and three at most, however many splits there are.
    assert torch.equal(run(case, num_splits=8, min_split=48), run(case, num_splits=2, min_split=48))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 6e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_slots_never_show_whatever_they_hold(poison: float, dtype: torch.dtype) -> None:
    """13 and 37 tokens in blocks of 4: three slots of the last block hold no token."""
    poisoned = make_case([0, 36], [13, 1], num_kv_heads=1, dtype=dtype, poison=poison)
    clean = make_case([0, 36], [13, 1], num_kv_heads=1, dtype=dtype, poison=0.0)
    out = run(poisoned, num_splits=2)
    assert torch.equal(out, run(clean, num_splits=2))
    assert_close(out, clean.exact())


@pytest.mark.parametrize("tail", [-1, 2**30, 0])
def test_entries_past_a_sequences_last_block_are_never_read(tail: int) -> None:
    """An id beyond the pool would end the process: the interpreter reads real addresses."""
    case = make_case(CONTEXTS, QUERIES)
    tables = np.full((len(QUERIES), 20), tail, dtype=np.int32)
    for row, table in enumerate(case.tables):
        tables[row, : len(table)] = table
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(dirty, num_splits=2), run(case, num_splits=2))


@pytest.mark.parametrize("stored", [Stored(), STORED[0]], ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_is_used_is_read_and_nothing_else_and_outputs_are_written_once(
    num_splits: int, window: int | None, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address of each load and store, of the pool, the tables and the rest."""
    options = AttentionOptions(window=window)
    case = make_case(
        CONTEXTS, QUERIES, head_dim=20, block_size=3, group=3, options=options, **stored
    )
    accesses = watched(monkeypatch)
    plan = Plan(Tiles(16, 16, 1, 1), 3, num_splits, 16)
    batch, out = upload(case.batch, case.q.device), torch.empty_like(case.q)
    launch(case.q, case.cache, batch, case.options, plan, out)

    outputs = set(accesses.written)
    assert len(outputs) == len(accesses.written)  # no two programs race
    assert outputs >= addresses(out)
    assert num_splits > 1 or outputs == addresses(out)
    allowed = addresses(case.q) | addresses(batch.query_start)
    for row, num_tokens in enumerate(case.batch.seq_lens.tolist()):
        if case.batch.query_start[row] == case.batch.query_start[row + 1]:
            continue
        allowed |= addresses(batch.seq_lens[row])
        first_seen = 0 if window is None else max(0, case.batch.context_lens[row] - window + 1)
        for position in range(first_seen, num_tokens):
            block, offset = case.tables[row][position // 3], position % 3
            allowed |= addresses(batch.block_tables[row, position // 3])
            allowed |= addresses(case.cache.keys[block, :, offset])
            allowed |= addresses(case.cache.values[block, :, offset])
            if case.cache.scales is not None:
                allowed |= addresses(case.cache.scales.keys[block, :, offset])
                allowed |= addresses(case.cache.scales.values[block, :, offset])
    # The parts of a split are written and read again.
    assert set(accesses.read) - outputs == allowed
    assert not outputs & allowed


# Strides of [N, Hkv = 2, B, D] for blocks, heads, tokens and elements.
LAYOUTS = {
    "tokens before heads": lambda n, b, d: (2 * b * d, d, 2 * d, 1),
    "K and V of a block together, tokens first": lambda n, b, d: (4 * b * d, d, 2 * d, 1),
    "heads outermost": lambda n, b, d: (b * d, n * b * d, d, 1),
    "all at odd distances": lambda n, b, d: (3 * b * (d + 1) + 5, b * (d + 1) + 3, d + 1, 1),
    "elements apart": lambda n, b, d: (4 * b * d, 2 * b * d, 2 * d, 2),
}


def restrided(cache: torch.Tensor, layout: str) -> torch.Tensor:
    num_blocks, _, block_size, head_dim = cache.shape
    strides = LAYOUTS[layout](num_blocks, block_size, head_dim)
    memory = torch.full((5 * num_blocks * block_size * (head_dim + 2),), torch.nan)
    return memory.as_strided(cache.shape, strides, storage_offset=7).copy_(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_taken_from_each_cache(layout: str) -> None:
    case = make_case(CONTEXTS, QUERIES)
    expected = run(case)
    keys, values = restrided(case.cache.keys, layout), restrided(case.cache.values, layout)
    assert torch.equal(run(case.with_caches(keys, values)), expected)
    assert torch.equal(run(case.with_caches(keys, case.cache.values)), expected)


def test_queries_may_be_a_strided_view() -> None:
    """q as a slice of a fused [q, k, v] projection, and with elements apart."""
    case = make_case(CONTEXTS, QUERIES)
    fused = torch.cat([case.q, case.q], dim=1)[:, : case.q.shape[1]]
    apart = torch.stack([case.q, case.q], dim=3)[..., 0]
    for q in (fused, apart):
        assert not q.is_contiguous()
        assert torch.equal(run(replace(case, q=q)), run(case))


def test_tokens_and_heads_may_be_billions_of_elements_apart() -> None:
    """Products with them do not fit into 32 bits. The memory is a sparse file."""
    case = make_case([3], [4], num_kv_heads=3, group=1, block_size=2, dtype=torch.float16)
    far = 2**30
    memory = sparse_bytes(4 * far * 2).view(torch.float16)
    q = memory.as_strided(case.q.shape, (far, 16, 1)).copy_(case.q)
    assert torch.equal(run(replace(case, q=q)), run(case))
    strides = (2 * 16, far, 16, 1)
    keys = memory[1024:].as_strided(case.cache.keys.shape, strides).copy_(case.cache.keys)
    values = memory[2048:].as_strided(case.cache.keys.shape, strides).copy_(case.cache.values)
    assert torch.equal(run(case.with_caches(keys, values)), run(case))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_token_does_not_see_later_ones(num_splits: int) -> None:
    case = make_case([6], [30], num_kv_heads=1, group=4)
    early = run(case, num_splits=num_splits)
    slots = torch.from_numpy(case.batch.slot_mapping[12:])
    case.cache.keys[slots // 4, :, slots % 4] = 100.0
    case.cache.values[slots // 4, :, slots % 4] = 100.0
    late = run(case, num_splits=num_splits)
    assert torch.equal(late[:12], early[:12])
    assert not torch.equal(late[12:], early[12:])


@pytest.mark.parametrize("scale", [1e4, -1e4, 0.0, 1e-45, -1e-300])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_scales_of_any_sign_and_size(scale: float, num_splits: int) -> None:
    case = make_case([40, 2], [1, 4], num_kv_heads=1, scale=scale)
    assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_block_is_far_outside_the_tolerance(dtype: torch.dtype, num_splits: int) -> None:
    case = make_case([255], [1], num_kv_heads=1, block_size=16, dtype=dtype)
    tables = case.batch.block_tables.copy()
    tables[0, [3, 4]] = tables[0, [5, 5]]
    wrong = replace(case, batch=replace(case.batch, block_tables=tables))
    exact = case.exact()
    assert is_close(run(case, num_splits=num_splits), exact)
    assert not is_close(run(wrong, num_splits=num_splits), exact)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_batch_may_grow_on_the_device_after_the_plan_was_made(num_splits: int) -> None:
    """As in a captured graph: the same grid for other lengths with the same sums."""
    case = make_case([40, 2, 9], [1, 4, 1])
    other = make_case([0, 60, 9], [0, 1, 5])
    grown = upload(other.batch, other.q.device)
    plan = Plan(Tiles(16, 16, 1, 1), 2, num_splits, 16)
    out = torch.full(case.q.shape, torch.nan)
    launch(other.q, other.cache, grown, other.options, plan, out)
    assert_close(out, other.exact())


@pytest.mark.parametrize("contexts", [[], [0], [5], [0, 8, 0]])
def test_calls_without_new_tokens_give_an_empty_output(contexts: Sequence[int]) -> None:
    case = make_case(contexts, [0] * len(contexts))
    for launcher in (paged_attention, prefill_module.prefill, decode_module.decode):
        out = launcher(case.q, case.cache, case.batch, case.options)
        assert out.shape == (0, 4, 16)
