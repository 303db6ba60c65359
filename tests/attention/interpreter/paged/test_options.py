"""Windows, soft caps, ALiBi, sinks and quantised caches through the kernels, against float64."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention import selection
from prefixcache.types import AttentionOptions
from tests.attention.kernel_runs import run
from tests.attention.paged_cases import DTYPES, OPTIONS, STORED, Stored, make_case
from tests.support.tolerances import assert_close, is_close

# NaN out of -inf - -inf, or out of 0 * inf, shows even where it is dropped later.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# Crosses block ends; one token, an empty query, full blocks, long context with one token.
CONTEXTS, QUERIES = [0, 5, 4, 0, 60, 7, 0], [9, 1, 0, 1, 1, 5, 8]
NUM_HEADS = 4


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_alone_and_together(name: str, num_splits: int) -> None:
    case = make_case(CONTEXTS, QUERIES, options=OPTIONS[name])
    out = run(case, num_splits=num_splits)
    assert_close(out, case.exact())
    assert not is_close(out, replace(case, options=AttentionOptions()).exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.usefixtures("float8_way")
def test_quantised_caches(stored: Stored, dtype: torch.dtype) -> None:
    case = make_case(CONTEXTS, QUERIES, dtype=dtype, **stored)
    assert_close(run(case), case.exact())
    assert_close(run(case, num_splits=2), case.exact())


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_options_together_over_quantised_caches(stored: Stored) -> None:
    case = make_case(CONTEXTS, QUERIES, options=OPTIONS["all"], **stored)
    for num_splits in (1, 4):
        assert_close(run(case, num_splits=num_splits), case.exact())


def a_number_for_each_head(least: float, most: float) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*[st.floats(least, most)] * NUM_HEADS)


options = st.builds(
    AttentionOptions,
    scale=st.sampled_from([None, None, -0.3, 0.0]),
    window=st.none() | st.integers(1, 50),
    soft_cap=st.none() | st.floats(0.5, 50),
    alibi_slopes=st.just(()) | a_number_for_each_head(-0.05, 1),
    sinks=st.just(()) | a_number_for_each_head(-3, 3),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=4),
    options=options,
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([16, 20]),
    block_size=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from([{}, *STORED]),
    num_splits=st.sampled_from([1, 1, 2, 4]),
    by_hand=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_mixture_equals_float64_with_nan_in_every_unused_slot_and_scale(
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    stored: Stored,
    num_splits: int,
    by_hand: bool,
    **arguments: object,
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    if sum(queries) == 0:
        queries[0] = 1
    group = NUM_HEADS // num_kv_heads
    case = make_case(
        contexts, queries, num_kv_heads=num_kv_heads, group=group, **stored, **arguments
    )
    with pytest.MonkeyPatch.context() as patch:
        if by_hand:
            patch.setattr(selection, "FLOAT8_ARCHITECTURES", set())
        assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [1, 3, 4, 15, 16, 17, 61, 1000, 2**40])
def test_windows_of_any_length(window: int, num_splits: int) -> None:
    """One token, a block of 4, a tile of 16 and around, all of it and more."""
    case = make_case(CONTEXTS, QUERIES, options=AttentionOptions(window=window))
    assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [1, 5, 30])
def test_tiles_before_behind_and_between_the_ends_of_a_window(window: int, num_splits: int) -> None:
    """Chunks of more tokens than a tile has keys, and windows with and without whole tiles."""
    case = make_case([70, 3], [20, 40], group=1, options=AttentionOptions(window=window))
    for rows in (16, 64):
        assert_close(run(case, rows=rows, num_splits=num_splits), case.exact())


def test_a_row_whose_window_starts_behind_the_first_split_takes_nothing_from_it() -> None:
    """Of 16 queries in one program the last ones see no key of the first run of 16."""
    case = make_case([16], [16], group=1, options=AttentionOptions(window=4, sinks=(1.0, -1.0)))
    assert_close(run(case, num_splits=4), case.exact())


def test_splits_share_out_the_window_and_not_the_context() -> None:
    """Of 200 keys 40 are seen: 4 runs of 16 are enough, and 1 of 48 is."""
    case = make_case([199], [1], num_kv_heads=1, options=AttentionOptions(window=40))
    one = run(case, num_splits=2, min_split=48)
    assert_close(one, case.exact())
    assert torch.equal(one, run(case, num_splits=8, min_split=48))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_lies_before_the_window_is_never_read(num_splits: int) -> None:
    """An id beyond the pool would end the process: the interpreter reads real addresses."""
    case = make_case([50, 7], [1, 3], options=AttentionOptions(window=6))
    expected = run(case, num_splits=num_splits)
    tables = case.batch.block_tables.copy()
    tables[0, :11] = 2**30  # of 51 tokens the last one sees 45 to 50
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(dirty, num_splits=num_splits, checked=False), expected)
    block = case.tables[0][11]
    case.cache.keys[block, :, 0] = torch.nan  # position 44
    case.cache.values[block, :, 0] = torch.nan
    assert torch.equal(run(case, num_splits=num_splits), expected)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("sink", [-1e30, -50.0, 0.0, 50.0, 3e38])
def test_sinks_of_any_size(sink: float, num_splits: int) -> None:
    """From one that takes nothing to one that takes all."""
    case = make_case(CONTEXTS, QUERIES, options=AttentionOptions(sinks=(sink, 0.0, sink, 1.0)))
    assert_close(run(case, num_splits=num_splits), case.exact())


@pytest.mark.parametrize("soft_cap", [1e-40, 1e-3, 1.0, 50.0, 1e6, 1e300])
def test_soft_caps_of_any_size(soft_cap: float) -> None:
    case = make_case(CONTEXTS, QUERIES, options=AttentionOptions(soft_cap=soft_cap, scale=1.5))
    assert_close(run(case), case.exact())


@pytest.mark.parametrize("scale", [-2.0, -0.1, 0.0, 1e-45])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_scale_that_is_not_positive_with_every_option(name: str, scale: float) -> None:
    case = make_case([20, 3], [1, 6], options=replace(OPTIONS[name], scale=scale))
    for num_splits in (1, 2):
        assert_close(run(case, num_splits=num_splits), case.exact())


def test_a_steep_slope_far_back_in_a_long_context() -> None:
    slopes = AttentionOptions(alibi_slopes=(0.9, 2.0**-8))
    case = make_case([700], [2], num_kv_heads=1, block_size=16, options=slopes)
    assert_close(run(case, keys=64), case.exact())


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("stored", [{}, *STORED[:3]], ids=str)
def test_a_key_of_nan_is_seen_as_such_by_those_after_it(stored: Stored, num_splits: int) -> None:
    case = make_case([0, 3], [40, 2], num_kv_heads=1, **stored)
    clean = run(case, num_splits=num_splits)
    block, offset = case.tables[0][8], 2  # position 34
    if case.cache.scales is None or case.cache.scales.fixed is not None:
        case.cache.keys[block, :, offset, 0] = torch.nan
    else:
        case.cache.scales.keys[block, :, offset] = torch.nan
    out = run(case, num_splits=num_splits)
    assert out[34:40].isnan().all()
    assert torch.equal(out[:34], clean[:34])
    assert torch.equal(out[40:], clean[40:])


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_half_precision_keeps_small_and_large_values_of_quantised_caches(
    stored: Stored, size: float
) -> None:
    """A weight times a scale of V may be far below the smallest normal float16."""
    case = make_case([200], [3], num_kv_heads=1, dtype=torch.float16, **stored)
    scales = replace(case.cache.scales, values=case.cache.scales.values * size, fixed=None)
    case = replace(case, cache=replace(case.cache, scales=scales))
    exact = case.exact()
    error = (run(case).double() - exact).abs().max() / exact.abs().max()
    assert error < 2e-3


def test_strides_of_scales_are_taken_from_each_cache() -> None:
    case = make_case(CONTEXTS, QUERIES, stored=torch.int8)
    scales = case.cache.scales
    memory = torch.full((9 * scales.keys.numel(),), torch.nan)
    _, num_heads, block_size = scales.keys.shape
    strides = (3 * num_heads * block_size + 1, 1, 2 * num_heads)
    moved = memory[5:].as_strided(scales.keys.shape, strides).copy_(scales.keys)
    cache = replace(case.cache, scales=replace(scales, keys=moved))
    assert torch.equal(run(replace(case, cache=cache)), run(case))


def test_table_entries_past_the_end_are_never_read_over_quantised_caches() -> None:
    case = make_case(CONTEXTS, QUERIES, stored=torch.float8_e4m3fn, options=OPTIONS["all"])
    tables = np.full((len(QUERIES), 20), -1, dtype=np.int32)
    for row, table in enumerate(case.tables):
        tables[row, : len(table)] = table
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(dirty, num_splits=2), run(case, num_splits=2))
