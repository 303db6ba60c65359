"""Prefill and decode compute the same thing in several ways: all go through every test here."""

from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from prefixcache.attention import decode as decode_module
from prefixcache.attention import prefill as prefill_module
from prefixcache.attention import streaming as streaming_module
from prefixcache.attention.batch import make_batch
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.reference.attention import attention
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import DTYPES, PagedCase, make_case, make_latent_case
from tests.attention.paths import ALL, IN_TORCH, Launcher
from tests.support.tolerances import assert_close, is_close

each = pytest.mark.parametrize("launch", ALL.values(), ids=ALL)
each_in_torch = pytest.mark.parametrize("launch", IN_TORCH.values(), ids=IN_TORCH)
# Crosses block ends; one token, an empty query, full blocks, long context with one token.
CONTEXTS, QUERIES = [0, 5, 4, 0, 33, 7, 0], [9, 1, 0, 1, 1, 5, 8]


def run(launch: Launcher, case: PagedCase) -> torch.Tensor:
    return launch(case.q, case.cache, case.batch, case.options)


def test_the_reference_agrees_with_torchs_own_attention() -> None:
    case = make_case([0], [11], num_kv_heads=2, group=3)
    batch = make_batch([np.arange(3, dtype=np.int32)], [0], [11], [0], block_size=4)
    caches = torch.randn(2, 3, 2, 4, 16, generator=torch.Generator().manual_seed(1)).double()
    k, v = caches.transpose(2, 3).reshape(2, 12, 2, 16)[:, :11].transpose(1, 2)
    q = case.q.double()
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), is_causal=True
    ).transpose(0, 1)
    torch.testing.assert_close(attention(q, KVCache(*caches), batch, AttentionOptions()), expected)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=5),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([8, 20, 32, 80]),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, -0.1, 0.0]),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_float64_with_nan_in_every_unused_slot(
    lengths: list[tuple[int, int]], seed: int, **dimensions: int
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    case = make_case(contexts, queries, seed=seed, **dimensions)
    exact = case.exact()
    for launch in ALL.values():
        out = run(launch, case)
        assert out.dtype == case.q.dtype
        assert_close(out, exact)


@each
@pytest.mark.parametrize("queries", [QUERIES, [0, 0], [40, 1]])
def test_the_output_can_go_into_memory_that_is_there(launch: Launcher, queries: list[int]) -> None:
    case = make_case(CONTEXTS[: len(queries)], queries)
    wanted = run(launch, case)
    # Not at the start of an allocation, as a place in shared memory.
    memory = torch.full((wanted.numel() + 6,), float("nan"), dtype=wanted.dtype)
    place = memory[3:-3].view(wanted.shape)
    assert launch(case.q, case.cache, case.batch, case.options, out=place) is place
    assert torch.equal(place, wanted)
    assert memory[:3].isnan().all()
    assert memory[-3:].isnan().all()


@each
def test_an_output_of_another_kind_is_refused(launch: Launcher) -> None:
    case = make_case([0], [5])
    right = run(launch, case)
    for wrong in (right[1:], right.double(), right.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(InvalidArgumentError) as refused:
            launch(case.q, case.cache, case.batch, case.options, out=wrong)
        assert refused.value.field == "out"


SLOPES, SINKS = (0.5, 0.0, 0.03, -0.2), (0.5, -30.0, 3.0, 0.0)
OPTIONS = {
    "plain": AttentionOptions(),
    "window": AttentionOptions(window=6),
    "window of one token": AttentionOptions(window=1),
    "window longer than all": AttentionOptions(window=10**6),
    "soft_cap": AttentionOptions(soft_cap=0.8),
    "alibi_slopes": AttentionOptions(alibi_slopes=SLOPES),
    "sinks": AttentionOptions(sinks=SINKS),
    "window and sinks": AttentionOptions(window=5, sinks=SINKS),
    "soft_cap and alibi_slopes": AttentionOptions(soft_cap=0.8, alibi_slopes=SLOPES),
    "all": AttentionOptions(0.2, window=7, soft_cap=1.5, alibi_slopes=SLOPES, sinks=SINKS),
}
STORED = {
    "as it comes": {},
    "float8, a scale a head": {"stored": torch.float8_e4m3fn},
    "int8, a scale a head": {"stored": torch.int8},
    "float8, fixed": {"stored": torch.float8_e4m3fn, "fixed_scales": (0.02, 0.015)},
    "int8, fixed": {"stored": torch.int8, "fixed_scales": (0.03, 0.025)},
}


@each
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stored", STORED)
def test_each_option_equals_float64_over_each_kind_of_cache(
    launch: Launcher, name: str, stored: str
) -> None:
    """With 20 new tokens too, which decode takes like prefill."""
    contexts, queries = [*CONTEXTS, 3], [*QUERIES, 20]
    for dtype in DTYPES:
        case = make_case(contexts, queries, dtype=dtype, options=OPTIONS[name], **STORED[stored])
        out = run(launch, case)
        assert out.dtype == dtype
        assert_close(out, case.exact())


@each
@pytest.mark.parametrize("name", OPTIONS)
def test_latents_are_keys_whose_first_elements_are_the_values(launch: Launcher, name: str) -> None:
    for dtype in DTYPES:
        case = make_latent_case([*CONTEXTS, 3], [*QUERIES, 20], dtype=dtype)
        case = replace(case, options=replace(OPTIONS[name], scale=case.options.scale))
        out = run(launch, case)
        assert out.shape == (len(case.q), 4, 32)
        assert_close(out, case.exact())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_options_over_any_cache_equal_float64(data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=3)
    )
    num_kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3)]))
    num_query_heads = num_kv_heads * group

    def per_head(lowest: float, highest: float) -> st.SearchStrategy[list[float]]:
        numbers = st.floats(lowest, highest, width=32)
        return st.just([]) | st.lists(numbers, min_size=num_query_heads, max_size=num_query_heads)

    options = AttentionOptions(
        scale=data.draw(st.sampled_from([None, 0.3])),
        window=data.draw(st.none() | st.integers(1, 50)),
        soft_cap=data.draw(st.none() | st.floats(0.5, 50)),
        # Slopes below 0 would make the scores, and so float32's errors, grow with the distance.
        alibi_slopes=tuple(data.draw(per_head(0, 1))),
        sinks=tuple(data.draw(per_head(-2, 2))),
    )
    case = make_case(
        [c for c, _ in lengths],
        [n for _, n in lengths],
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=data.draw(st.sampled_from([8, 20, 32])),
        block_size=data.draw(st.integers(1, 16)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        options=options,
        seed=data.draw(st.integers(0, 2**16)),
        **STORED[data.draw(st.sampled_from(list(STORED)))],
    )
    exact = case.exact()
    for launch in ALL.values():
        assert_close(run(launch, case), exact)


@each
@pytest.mark.parametrize("query_tokens", [1, 3, 20])
@pytest.mark.parametrize("name", ["window", "all"])
def test_blocks_that_the_window_does_not_reach_are_never_read(
    launch: Launcher, name: str, query_tokens: int
) -> None:
    """Nor are slots of the first block that it reaches: a server may have freed those tokens."""
    case = make_case([61], [query_tokens], options=OPTIONS[name])
    exact = case.exact()
    for position in range(61 - OPTIONS[name].window + 1):
        block, offset = case.tables[0][position // 4], position % 4
        case.cache.keys[block, :, offset] = torch.nan
        case.cache.values[block, :, offset] = torch.nan
    assert_close(run(launch, case), exact)


@each
def test_a_scale_that_is_not_a_number_shows_in_its_own_sequence_only(launch: Launcher) -> None:
    """A head with a NaN has the scale NaN: it must not become a plausible output."""
    case = make_case([9, 9], [1, 1], stored=torch.int8)
    case.cache.scales.keys[case.tables[1][0], 0, 2] = torch.nan
    out = run(launch, case)
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1, :2]).all()
    assert torch.isfinite(out[1, 2:]).all()


@each
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_head_dims_of_real_models(launch: Launcher, head_dim: int, group: int) -> None:
    """Powers of two and others."""
    for dtype in DTYPES:
        case = make_case(
            [3, 20], [9, 1], head_dim=head_dim, group=group, block_size=16, dtype=dtype
        )
        assert_close(run(launch, case), case.exact())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_lengths_around_the_ends_of_blocks_of_any_size(block_size: int, head_dim: int) -> None:
    """No read crosses from one block into its neighbour in the pool."""
    lengths = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130]
    case = make_case(
        [length - 1 for length in lengths],
        [1] * len(lengths),
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
    )
    exact = case.exact()
    for launch in ALL.values():
        assert_close(run(launch, case), exact)


@each
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 6e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_slots_never_show_whatever_they_hold(
    launch: Launcher, poison: float, dtype: torch.dtype
) -> None:
    """13 tokens in blocks of 4: three slots of the last block hold no token."""
    poisoned = make_case([0, 12], [13, 1], dtype=dtype, poison=poison)
    clean = make_case([0, 12], [13, 1], dtype=dtype, poison=0.0)
    assert torch.equal(run(launch, poisoned), run(launch, clean))
    assert_close(run(launch, poisoned), clean.exact())


@each
@pytest.mark.parametrize("tail", [-1, 2**30, -(2**31), 0])
def test_entries_past_a_sequences_last_block_are_never_read(launch: Launcher, tail: int) -> None:
    """Old ids of other live blocks (0), ids beyond the pool and padding alike."""
    case = make_case(CONTEXTS, QUERIES)
    tables = np.full((len(QUERIES), 20), tail, dtype=np.int32)
    for row, table in enumerate(case.tables):
        tables[row, : len(table)] = table
    dirty = replace(case, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(run(launch, dirty), run(launch, case))


# Strides of [N, Hkv = 2, B, D] for blocks, heads, tokens and elements.
LAYOUTS = {
    "tokens before heads": lambda n, b, d: (2 * b * d, d, 2 * d, 1),
    "K and V of a block together, tokens first": lambda n, b, d: (4 * b * d, d, 2 * d, 1),
    "heads outermost": lambda n, b, d: (b * d, n * b * d, d, 1),
    "blocks at odd distances": lambda n, b, d: (2 * b * d + 3, b * d, d, 1),
    "heads at odd distances": lambda n, b, d: (3 * b * d, b * d + 3, d, 1),
    "tokens at odd distances": lambda n, b, d: (3 * b * d, b * (d + 1), d + 1, 1),
}


def elements_apart(num_blocks: int, block_size: int, head_dim: int) -> tuple[int, int, int, int]:
    tile = 2 * block_size * head_dim
    return 2 * tile, tile, 2 * head_dim, 2


def restrided(
    cache: torch.Tensor, layout: Callable[[int, int, int], tuple[int, int, int, int]]
) -> torch.Tensor:
    num_blocks, _, block_size, head_dim = cache.shape
    strides = layout(num_blocks, block_size, head_dim)
    num_bytes = 5 * num_blocks * block_size * head_dim * cache.itemsize
    memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8).view(cache.dtype)  # NaN, or -1
    return memory.as_strided(cache.shape, strides, storage_offset=7).copy_(cache)


def test_elements_need_not_lie_side_by_side() -> None:
    case = make_case(CONTEXTS, QUERIES)
    exact = case.exact()
    caches = (restrided(cache, elements_apart) for cache in (case.cache.keys, case.cache.values))
    cache_apart = case.with_caches(*caches)
    queries_apart = replace(case, q=case.q.repeat_interleave(2, dim=2)[..., ::2])
    for launch in (prefill, decode, *IN_TORCH.values()):
        assert_close(run(launch, cache_apart), exact)
        assert_close(run(launch, queries_apart), exact)


@each
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_taken_from_the_cache(
    launch: Launcher, layout: Callable[[int, int, int], tuple[int, int, int, int]], stored: str
) -> None:
    for dtype in DTYPES:
        case = make_case(CONTEXTS, QUERIES, dtype=dtype, **STORED[stored])
        keys, values = (restrided(one, layout) for one in (case.cache.keys, case.cache.values))
        placed = replace(case, cache=replace(case.cache, keys=keys, values=values))
        assert_close(run(launch, placed), case.exact())


@each
def test_queries_may_be_a_strided_view(launch: Launcher) -> None:
    """q as the engine's slice of a fused [q, k, v] projection."""
    case = make_case(CONTEXTS, QUERIES)
    fused = torch.cat([case.q, case.q], dim=1)[:, : case.q.shape[1]]
    assert torch.equal(run(launch, replace(case, q=fused)), run(launch, case))


@each
def test_no_sequences_give_an_empty_output(launch: Launcher) -> None:
    case = make_case([], [])
    assert run(launch, case).shape == (0, 4, 16)


@each
@pytest.mark.parametrize("contexts", [[0], [5], [0, 8, 0]])
def test_sequences_without_new_tokens_give_an_empty_output(
    launch: Launcher, contexts: list[int]
) -> None:
    """Not even a context: no maximum over nothing, no NaN."""
    case = make_case(contexts, [0] * len(contexts))
    assert run(launch, case).shape == (0, 4, 16)


@each
def test_the_output_is_new_memory_and_inputs_stay(launch: Launcher) -> None:
    case = make_case(CONTEXTS, QUERIES, poison=0.0)
    before = case.q.clone(), case.cache.keys.clone(), case.cache.values.clone()
    run(launch, case).fill_(7.0)
    after = case.q, case.cache.keys, case.cache.values
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@each_in_torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompts_take_several_steps(
    launch: Launcher, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps end inside blocks, and the K/V of all heads are too many at once."""
    monkeypatch.setattr(prefill_module, "QUERY_STEP", 7)
    monkeypatch.setattr(prefill_module, "_KEY_ELEMENTS", 100 * 16 * 2)
    case = make_case([70, 0, 3], [30, 90, 7], num_kv_heads=3, block_size=5, dtype=dtype)
    assert 30 > decode_module.FEW_TOKENS > 7  # decode takes both of its ways
    assert_close(run(launch, case), case.exact())


def test_a_prompt_longer_than_a_step_as_it_comes() -> None:
    case = make_case([40], [prefill_module.QUERY_STEP + 30], num_kv_heads=1, block_size=16)
    exact = case.exact()
    for launch in ALL.values():
        assert_close(run(launch, case), exact)


@each_in_torch
@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_long_contexts_take_several_tiles(
    launch: Launcher, name: str, query_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_module, "TILE_ELEMENTS", 2 * 4 * 16 * 3)
    # A tile is 3 blocks of 4 tokens.
    case = make_case([0, 11, 12, 13, 60], [query_tokens] * 5, options=OPTIONS[name])
    assert_close(run(launch, case), case.exact())


def test_a_call_never_holds_more_scores_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the query heads, the new tokens and the context."""
    case = make_case([0, 70], [1, 20], options=OPTIONS["soft_cap"])
    exact = case.exact()
    products = []

    def recorded(*factors: torch.Tensor) -> torch.Tensor:
        products.append(bmm(*factors))
        return products[-1]

    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", recorded)
    monkeypatch.setattr(streaming_module, "MAX_SCORES", 128)
    for launch in IN_TORCH.values():
        assert_close(run(launch, case), exact)
    assert max(product.numel() for product in products) == 128


def test_a_tile_is_never_less_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_module, "TILE_ELEMENTS", 1)
    case = make_case([9], [1])
    for launch in IN_TORCH.values():
        assert_close(run(launch, case), case.exact())


@each
@pytest.mark.parametrize("group", [1, 4])
def test_a_token_does_not_see_later_ones(launch: Launcher, group: int) -> None:
    case = make_case([6], [30], group=group)
    early = run(launch, case)
    slots = torch.from_numpy(case.batch.slot_mapping[12:])
    case.cache.keys[slots // 4, :, slots % 4] = 100.0
    case.cache.values[slots // 4, :, slots % 4] = 100.0
    late = run(launch, case)
    assert torch.equal(late[:12], early[:12])
    assert not torch.equal(late[12:], early[12:])


@each
def test_very_large_scores_do_not_overflow(launch: Launcher) -> None:
    case = make_case(CONTEXTS, QUERIES, scale=1e4)
    assert_close(run(launch, case), case.exact())


@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_block_is_far_outside_the_tolerance(launch: Launcher, dtype: torch.dtype) -> None:
    """The tolerance tells rounding from a wrong block, in the longest context tested here."""
    case = make_case([255], [1], block_size=16, dtype=dtype)
    tables = case.batch.block_tables.copy()
    tables[0, [3, 4]] = tables[0, [5, 5]]
    wrong = replace(case, batch=replace(case.batch, block_tables=tables))
    exact = case.exact()
    assert is_close(run(launch, case), exact)
    assert not is_close(run(launch, wrong), exact)
