"""Shared blocks read once on CPU: the same numbers as without it, and when it is done."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention import decode as decode_module
from prefixcache.attention import prefill as prefill_module
from prefixcache.attention import selection
from prefixcache.attention import shared_streaming as shared_module
from prefixcache.attention import streaming as streaming_module
from prefixcache.attention.batch import PrefixSharing
from prefixcache.attention.decode import decode_in_torch
from prefixcache.attention.prefill import prefill_in_torch
from prefixcache.attention.sequence_kv import KVReader
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import DTYPES, PagedCase, make_case, make_latent_case
from tests.attention.paths import NATIVE
from tests.attention.shared_cases import Sharing, share, sharings, with_sharing
from tests.support.tolerances import assert_close, is_close

# A system prompt of 3 blocks; two conversations go on for 5 more; a stranger; an empty query.
CONTEXTS, QUERIES = [33, 40, 34, 17, 35, 14, 20], [1, 3, 2, 1, 1, 16, 0]
TRIE = [None, Sharing(0, 3), Sharing(0, 8), None, Sharing(1, 8), Sharing(0, 3), Sharing(1, 4)]
EVERY_OPTION = AttentionOptions(
    scale=0.4, soft_cap=2.0, alibi_slopes=(0.5, 0.0, -0.1, 0.02), sinks=(0.0, 3.0, -20.0, 1.0)
)


def run(case: PagedCase) -> torch.Tensor:
    return decode_in_torch(case.q, case.cache, case.batch, case.options)


def assert_all_close(case: PagedCase) -> None:
    """By the torch path, and by each compiled form."""
    exact = case.exact()
    for attend in (decode_in_torch, prefill_in_torch, *NATIVE.values()):
        assert_close(attend(case.q, case.cache, case.batch, case.options), exact)


@pytest.fixture
def shared_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each call that reads shared blocks once."""
    calls: list[int] = []

    def attend_shared(*arguments: object) -> None:
        calls.append(1)
        shared_module.attend_shared(*arguments)

    monkeypatch.setattr(decode_module, "attend_shared", attend_shared)
    return calls


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 18)), min_size=1, max_size=6),
    data=st.data(),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([8, 20, 32]),
    block_size=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, -0.1, 0.0]),
    seed=st.integers(0, 2**16),
)
def test_any_trie_equals_float64_with_nan_in_every_unused_slot(
    lengths: list[tuple[int, int]], data: st.DataObject, **dimensions: int
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    case = share(make_case(contexts, queries, **dimensions), data.draw(sharings(len(lengths))))
    assert_all_close(case)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("fixed_scales", [None, (0.02, 0.03)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_and_way_to_store(
    dtype: torch.dtype,
    stored: torch.dtype | None,
    fixed_scales: tuple[float, float] | None,
    shared_calls: list[int],
) -> None:
    case = make_case(
        CONTEXTS,
        QUERIES,
        options=EVERY_OPTION,
        dtype=dtype,
        stored=stored,
        fixed_scales=fixed_scales if stored else None,
    )
    case = share(case, TRIE)
    assert_all_close(case)
    assert shared_calls


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents(dtype: torch.dtype, shared_calls: list[int]) -> None:
    case = share(make_latent_case(CONTEXTS, QUERIES, dtype=dtype), TRIE)
    assert_all_close(case)
    assert shared_calls


def test_a_window_sees_the_end_of_a_run_only_and_so_each_sequence_reads_its_own(
    shared_calls: list[int],
) -> None:
    case = share(make_case(CONTEXTS, QUERIES, options=AttentionOptions(window=9)), TRIE)
    assert_all_close(case)
    assert not shared_calls


def test_forks_and_several_tiles_and_steps(
    shared_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 3 blocks end inside runs; scores of 2 queries are held at a time."""
    monkeypatch.setattr(streaming_module, "TILE_ELEMENTS", 2 * 4 * 16 * 3)
    monkeypatch.setattr(shared_module, "MAX_SCORES", 2 * 4 * 12)
    forks = share(make_case([41] * 5, [1] * 5), [None] + [Sharing(0, 10)] * 4)
    assert_all_close(forks)
    case = share(make_case(CONTEXTS, QUERIES), TRIE)
    assert_all_close(case)
    assert len(shared_calls) == 2


def test_a_shared_block_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    tiles = KVReader.tiles

    def counting_tiles(reader: KVReader, table, start: int, end: int):
        read.extend(table[start // 4 : -(-end // 4)].tolist())
        return tiles(reader, table, start, end)

    monkeypatch.setattr(KVReader, "tiles", counting_tiles)
    case = share(make_case(CONTEXTS[:-1], QUERIES[:-1]), TRIE[:-1])
    run(case)
    assert len(read) == len(set(read))
    assert set(read) == {block for table in case.tables for block in table.tolist()}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 6e4])
def test_unused_slots_never_show_whatever_they_hold(poison: float) -> None:
    poisoned = share(make_case(CONTEXTS, QUERIES, poison=poison), TRIE)
    clean = share(make_case(CONTEXTS, QUERIES, poison=0.0), TRIE)
    assert torch.equal(run(poisoned), run(clean))


def test_very_large_scores_do_not_overflow() -> None:
    case = share(make_case(CONTEXTS, QUERIES, scale=1e4), TRIE)
    assert_all_close(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_block_of_a_run_is_far_outside_the_tolerance(dtype: torch.dtype) -> None:
    case = make_case([255, 252], [1, 1], block_size=16, dtype=dtype)
    case = share(case, [None, Sharing(0, 15)])
    tables = case.batch.block_tables.copy()
    tables[:, 3] = tables[0, 5]
    wrong = replace(case, batch=replace(case.batch, block_tables=tables))
    exact = case.exact()
    assert is_close(run(case), exact)
    assert not is_close(run(wrong)[:1], exact[:1])
    assert not is_close(run(wrong)[1:], exact[1:])


def test_it_is_taken_where_enough_is_saved(
    shared_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 shared tokens of two heads are 2 x 2 x 128 x 16 elements of 4 bytes."""
    case = make_case([129, 130], [1, 1])
    case = share(case, [None, Sharing(0, 32)], PrefixSharing.AUTO)
    saved = 2 * 2 * 128 * 16 * 4
    for least, expected in ((saved + 1, 0), (saved, 1)):
        monkeypatch.setattr(selection, "MIN_SAVED_BYTES", least)
        assert_all_close(case)
        assert len(shared_calls) == expected
    assert_close(run(with_sharing(case, PrefixSharing.NEVER)), case.exact())
    assert len(shared_calls) == 1


def test_short_chunks_of_a_prefill_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attend_shared = prefill_module.attend_shared
    monkeypatch.setattr(
        prefill_module, "attend_shared", lambda *a: (calls.append(1), attend_shared(*a))
    )
    case = share(make_case(CONTEXTS, QUERIES), TRIE)
    flat = with_sharing(case, PrefixSharing.NEVER)
    for each in (case, flat):
        out = prefill_in_torch(each.q, each.cache, each.batch, each.options)
        assert_close(out, each.exact())
    assert len(calls) == 1


def test_little_is_shared_only_if_it_must_be(shared_calls: list[int]) -> None:
    case = share(make_case(CONTEXTS, QUERIES), TRIE, PrefixSharing.AUTO)
    run(case)
    assert not shared_calls
    run(with_sharing(case, PrefixSharing.ALWAYS))
    assert shared_calls
