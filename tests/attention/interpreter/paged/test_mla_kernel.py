"""The kernel for latents against float64, with every slot that holds no token poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention.decode import decode
from prefixcache.attention.device_batch import upload
from prefixcache.attention.paged_attention import launch
from prefixcache.attention.prefill import prefill
from prefixcache.attention.selection import Plan, Tiles
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions
from tests.attention.kernel_runs import run
from tests.attention.paged_cases import DTYPES, OPTIONS, make_latent_case
from tests.attention.test_large_pools import sparse_bytes
from tests.support.kernel_memory import addresses, watched
from tests.support.tolerances import assert_close, is_close

# NaN out of -inf - -inf, or out of 0 * inf, shows even where it is dropped later.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# Crosses block ends; one token, an empty query, full blocks, long context with one token.
CONTEXTS, QUERIES = [0, 5, 4, 0, 33, 7, 0], [9, 1, 0, 1, 1, 5, 8]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=4),
    num_query_heads=st.sampled_from([1, 3, 8, 16, 21]),
    latent_dim=st.sampled_from([16, 24, 32, 64]),
    rope_dim=st.sampled_from([0, 1, 8, 16, 20]),
    block_size=st.integers(1, 64),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, None, -0.1, 0.0]),
    num_splits=st.sampled_from([1, 1, 2, 4]),
    rows=st.sampled_from([16, 32]),
    least_part=st.integers(1, 16),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_float64_with_nan_in_every_unused_slot(
    lengths: list[tuple[int, int]],
    num_splits: int,
    rows: int,
    least_part: int,
    num_query_heads: int,
    **arguments: object,
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    if sum(queries) == 0:
        queries[0] = 1
    case = make_latent_case(contexts, queries, num_query_heads=num_query_heads, **arguments)
    part = min(max(least_part, -(-num_query_heads // 2)), num_query_heads, rows)
    assert_close(run(case, rows=rows, num_splits=num_splits, group_part=part), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("latent_dim", "rope_dim"), [(512, 64), (256, 32)], ids=["DeepSeek-V2", "MiniCPM3"]
)
def test_latents_of_real_models(latent_dim: int, rope_dim: int, dtype: torch.dtype) -> None:
    """A decode, drafts, a chunk and a prompt; heads that are no power of two."""
    case = make_latent_case(
        [40, 7, 3, 0],
        [1, 3, 20, 12],
        num_query_heads=5,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        block_size=16,
        dtype=dtype,
    )
    assert_close(run(case), case.exact())
    assert_close(run(case, num_splits=2), case.exact())


@pytest.mark.parametrize(
    ("num_heads", "part"), [(1, 1), (5, 5), (16, 16), (16, 4), (20, 10), (23, 12), (40, 14)]
)
def test_heads_that_fill_the_rows_leave_some_over_or_take_several_programs(
    num_heads: int, part: int
) -> None:
    case = make_latent_case([4, 17], [3, 1], num_query_heads=num_heads, block_size=8)
    for num_splits in (1, 2):
        assert_close(run(case, group_part=part, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("block_size", [1, 2, 8, 13, 16, 32, 64])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int) -> None:
    """One token, full tiles, full blocks and one less and more of each."""
    lengths = sorted({1, 15, 16, 17, 33, max(1, block_size - 1), block_size, block_size + 1})
    contexts = [length - 1 for length in lengths]
    case = make_latent_case(contexts, [1] * len(lengths), block_size=block_size)
    assert_close(run(case, num_splits=2), case.exact())


@pytest.mark.parametrize("keys", [16, 64])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_heads", [1, 7])
def test_tiles_of_any_shape(rows: int, keys: int, num_heads: int) -> None:
    case = make_latent_case([0, 40, 64, 3], [33, 18, 1, 0], num_query_heads=num_heads, block_size=8)
    assert_close(run(case, rows=rows, keys=keys), case.exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_splits_with_and_without_tokens(num_splits: int, dtype: torch.dtype) -> None:
    """A context for all splits, for some, for one; chunks whose first rows see fewer splits."""
    case = make_latent_case([127, 40, 0, 0, 30], [1, 2, 1, 0, 20], dtype=dtype)
    assert_close(run(case, num_splits=num_splits), case.exact())


def test_a_row_without_tokens_in_a_split_weighs_nothing_however_low_the_other_scores_are() -> None:
    """Positions 14 and 15 see no token of the second split, which starts at 16."""
    case = make_latent_case([14], [10], num_query_heads=1, poison=0.0, scale=1e3)
    case.cache.keys.abs_()
    case.q.abs_().neg_()
    assert_close(run(case, num_splits=2), case.exact())


def test_runs_are_not_cut_below_the_least_length() -> None:
    case = make_latent_case([60, 70], [3, 1])
    few = run(case, num_splits=2, min_split=48)
    assert_close(few, case.exact())
    # 63 and 71 tokens are two runs at most, however many splits there are.
    assert torch.equal(run(case, num_splits=8, min_split=48), few)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 6e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_slots_never_show_whatever_they_hold(poison: float, dtype: torch.dtype) -> None:
    """13 and 37 tokens in blocks of 4: three slots of the last block hold no token."""
    poisoned = make_latent_case([0, 36], [13, 1], dtype=dtype, poison=poison)
    clean = make_latent_case([0, 36], [13, 1], dtype=dtype, poison=0.0)
    out = run(poisoned, num_splits=2)
    assert torch.equal(out, run(clean, num_splits=2))
    assert_close(out, clean.exact())


@pytest.mark.parametrize("tail", [-1, 2**30, 0])
def test_entries_past_a_sequences_last_block_are_never_read(tail: int) -> None:
    """An id beyond the pool would end the process: the interpreter reads real addresses."""
    case = make_latent_case(CONTEXTS, QUERIES)
    tables = np.full((len(QUERIES), 20), tail, dtype=np.int32)
    for row, table in enumerate(case.tables):
        tables[row, : len(table)] = table
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(dirty, num_splits=2), run(case, num_splits=2))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_each_latent_is_read_once_a_tile_and_nothing_unused_is(
    num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address of each load of the cache, and each store: one program has all the rows."""
    case = make_latent_case([70], [2], num_query_heads=8, latent_dim=20, rope_dim=12, block_size=3)
    accesses = watched(monkeypatch)
    plan = Plan(Tiles(16, 16, 4, 1), 8, num_splits, 16)
    out = torch.empty(2, 8, 20)
    launch(case.q, case.cache, upload(case.batch, case.q.device), case.options, plan, out)

    assert len(set(accesses.written)) == len(accesses.written)  # no two programs race
    used = set[int]()
    for position in range(72):
        block, offset = case.tables[0][position // 3], position % 3
        used |= addresses(case.cache.keys[block, :, offset])
    in_pool = [address for address in accesses.read if address in addresses(case.cache.keys)]
    assert set(in_pool) == used
    last = addresses(case.cache.keys[case.tables[0][23], :, 2])
    assert len(in_pool) - len(used) == 8 * len(last)  # 80 rows of tiles for 72 tokens


# Strides of [N, 1, B, D] for blocks, heads, tokens and elements.
LAYOUTS = {
    "blocks at odd distances": lambda b, d: (2 * b * d + 3, b * d, d, 1),
    "tokens at odd distances": lambda b, d: (3 * b * d, 5, d + 1, 1),
    "elements apart": lambda b, d: (4 * b * d, 2 * b * d, 2 * d, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_taken_from_the_cache(layout: str) -> None:
    case = make_latent_case(CONTEXTS, QUERIES)
    keys = case.cache.keys
    memory = torch.full((5 * keys.numel(),), torch.nan)
    strides = LAYOUTS[layout](*keys.shape[2:])
    moved = memory.as_strided(keys.shape, strides, storage_offset=7).copy_(keys)
    assert torch.equal(run(replace(case, cache=latent_cache(moved))), run(case))


def latent_cache(keys: torch.Tensor) -> KVCache:
    return KVCache(keys, keys[..., :32], is_latent=True)


def test_queries_may_be_a_strided_view() -> None:
    case = make_latent_case(CONTEXTS, QUERIES)
    fused = torch.cat([case.q, case.q], dim=1)[:, : case.q.shape[1]]
    apart = torch.stack([case.q, case.q], dim=3)[..., 0]
    for q in (fused, apart):
        assert not q.is_contiguous()
        assert torch.equal(run(replace(case, q=q)), run(case))


def test_blocks_and_tokens_may_be_billions_of_elements_apart() -> None:
    """Products with them do not fit into 32 bits. The memory is a sparse file."""
    case = make_latent_case([3], [3], dtype=torch.float16)
    far = 2**30
    memory = sparse_bytes(5 * far * 2).view(torch.float16)
    keys, width = case.cache.keys, case.q.shape[2]
    for strides in ((far, width, 1), (width, far, 1)):
        q = memory.as_strided(case.q.shape, strides).copy_(case.q)
        assert torch.equal(run(replace(case, q=q)), run(case))
    for block_stride, token_stride in ((far, width), (width, far)):
        moved = memory[1024:].as_strided(keys.shape, (block_stride, 1, token_stride, 1))
        moved.copy_(keys)
        assert torch.equal(run(replace(case, cache=latent_cache(moved))), run(case))


def test_rows_of_the_block_tables_may_be_a_billion_entries_long() -> None:
    """That of the third sequence starts beyond 2**31 entries. The memory is a sparse file."""
    case = make_latent_case([3, 0, 9], [1, 2, 1])
    tables = case.batch.block_tables
    wide = sparse_bytes(3 * 2**30 * 4).view(torch.int32).view(3, 2**30)
    wide[:, : tables.shape[1]] = torch.from_numpy(tables)
    batch = replace(upload(case.batch, case.q.device), block_tables=wide)
    out = torch.full((*case.q.shape[:2], 32), torch.nan)
    plan = Plan(Tiles(16, 16, 4, 1), 4, 1, 16)
    launch(case.q, case.cache, batch, case.options, plan, out)
    assert_close(out, case.exact())


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_token_does_not_see_later_ones(num_splits: int) -> None:
    case = make_latent_case([6], [30])
    early = run(case, num_splits=num_splits)
    slots = torch.from_numpy(case.batch.slot_mapping[12:])
    case.cache.keys[slots // 4, :, slots % 4] = 100.0
    late = run(case, num_splits=num_splits)
    assert torch.equal(late[:12], early[:12])
    assert not torch.equal(late[12:], early[12:])


@pytest.mark.parametrize("scale", [1e4, -1e4, 0.0, 1e-45, -1e-300])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_scales_of_any_sign_and_size(scale: float, num_splits: int) -> None:
    case = make_latent_case([40, 2], [1, 4], scale=scale)
    assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_alone_and_together(name: str, num_splits: int) -> None:
    case = make_latent_case([*CONTEXTS, 60], [*QUERIES, 1], options=OPTIONS[name])
    out = run(case, num_splits=num_splits)
    assert_close(out, case.exact())
    # Heads in two programs: each has its own slopes and sinks.
    assert_close(run(case, num_splits=num_splits, group_part=3), case.exact())
    plain = AttentionOptions(scale=case.options.scale)
    assert not is_close(out, replace(case, options=plain).exact())


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [1, 3, 4, 15, 16, 17, 61, 1000, 2**40])
def test_windows_of_any_length(window: int, num_splits: int) -> None:
    options = AttentionOptions(window=window, sinks=(1.0, -1.0, 0.0, 3.0))
    case = make_latent_case([0, 60, 20, 7], [9, 1, 20, 0], options=options)
    assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_lies_before_the_window_is_never_read(num_splits: int) -> None:
    case = make_latent_case([50, 7], [1, 3], options=AttentionOptions(window=6))
    expected = run(case, num_splits=num_splits)
    tables = case.batch.block_tables.copy()
    tables[0, :11] = 2**30  # of 51 tokens the last one sees 45 to 50
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(dirty, num_splits=num_splits, checked=False), expected)
    case.cache.keys[case.tables[0][11], :, 0] = torch.nan  # position 44
    assert torch.equal(run(case, num_splits=num_splits), expected)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_block_is_far_outside_the_tolerance(dtype: torch.dtype, num_splits: int) -> None:
    case = make_latent_case([255], [1], block_size=16, dtype=dtype)
    tables = case.batch.block_tables.copy()
    tables[0, [3, 4]] = tables[0, [5, 5]]
    wrong = replace(case, batch=replace(case.batch, block_tables=tables))
    exact = case.exact()
    assert is_close(run(case, num_splits=num_splits), exact)
    assert not is_close(run(wrong, num_splits=num_splits), exact)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_batch_may_grow_on_the_device_after_the_plan_was_made(num_splits: int) -> None:
    """As in a captured graph: the same grid for other lengths with the same sums."""
    case = make_latent_case([40, 2, 9], [1, 4, 1])
    other = make_latent_case([0, 60, 9], [0, 1, 5])
    plan = Plan(Tiles(16, 16, 4, 1), 4, num_splits, 16)
    out = torch.full((*case.q.shape[:2], 32), torch.nan)
    grown = upload(other.batch, other.q.device)
    launch(other.q, other.cache, grown, other.options, plan, out)
    assert_close(out, other.exact())


@pytest.mark.parametrize("launcher", [prefill, decode])
@pytest.mark.parametrize("num_heads", [4, 40])
def test_prefill_and_decode_hand_latents_to_the_kernel(
    launcher, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []
    monkeypatch.setattr("prefixcache.attention.paged_attention.launch_mla", counted(launches))
    case = make_latent_case(CONTEXTS, QUERIES, num_query_heads=num_heads, dtype=torch.bfloat16)
    out = launcher(case.q, case.cache, case.batch, case.options)
    assert len(launches) == 1
    assert out.dtype == torch.bfloat16
    assert_close(out, case.exact())


def counted(launches: list[object]):
    from prefixcache.attention.mla import launch_mla

    return lambda *arguments: (launches.append(arguments), launch_mla(*arguments))


@pytest.mark.parametrize("contexts", [[], [0], [5], [0, 8, 0]])
def test_calls_without_new_tokens_give_an_empty_output(contexts: Sequence[int]) -> None:
    case = make_latent_case(contexts, [0] * len(contexts))
    for launcher in (prefill, decode):
        out = launcher(case.q, case.cache, case.batch, case.options)
        assert out.shape == (0, 4, 32)
