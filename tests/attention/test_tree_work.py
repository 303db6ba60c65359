"""The work list: every key of every query in one item, whatever the limits of the items are."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from prefixcache.attention.shared_prefix import plan_shared_prefix
from prefixcache.attention.tree_work import ItemLimits, TreeWork, make_work
from tests.attention.paged_cases import make_case
from tests.attention.shared_cases import Sharing, share, sharings

LIMITS = ItemLimits(num_queries=4, key_step=16, min_keys=16, num_items=1)


def items_of(work: TreeWork) -> list[list[int]]:
    return [*work.narrow_items.tolist(), *work.wide_items.tolist()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 80), st.integers(0, 20)), min_size=2, max_size=7),
    data=st.data(),
    block_size=st.integers(1, 8),
    max_narrow_queries=st.integers(0, 6),
    num_queries=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    min_steps=st.integers(1, 3),
    num_items=st.integers(1, 60),
)
def test_every_key_of_every_query_is_in_one_item(
    lengths: list[tuple[int, int]],
    data: st.DataObject,
    block_size: int,
    max_narrow_queries: int,
    num_queries: tuple[int, int],
    min_steps: int,
    num_items: int,
) -> None:
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    trie = data.draw(sharings(len(lengths)))
    case = make_case(contexts, queries, num_kv_heads=1, head_dim=1, block_size=block_size)
    batch = share(case, trie).batch
    plan = plan_shared_prefix(batch, block_size, 0)
    if plan is None:
        return
    limits = [ItemLimits(n, 16, 16 * min_steps, num_items) for n in num_queries]
    work = make_work(batch, plan, max_narrow_queries, *limits)

    num_tokens = int(batch.query_start[-1])
    assert sorted(work.query_tokens.tolist()) == list(range(num_tokens))
    read: list[list[int]] = [[] for _ in range(num_tokens)]
    slots: list[list[int]] = [[] for _ in range(num_tokens)]
    for sequence, start, seen_by_all, end, first, stop, slot in items_of(work):
        assert start <= seen_by_all <= end
        assert start < end <= work.positions[stop - 1] + 1  # no key that no query sees
        tokens = work.query_tokens[first:stop].tolist()
        for index, token in enumerate(tokens):
            owner = int(np.searchsorted(batch.query_start, token, "right")) - 1
            position = int(work.positions[first + index])
            assert position == batch.context_lens[owner] + token - batch.query_start[owner]
            assert seen_by_all <= max(start, position + 1)
            blocks = range(start // block_size, -(-end // block_size))
            assert all(
                batch.block_tables[owner, b] == batch.block_tables[sequence, b] for b in blocks
            )
            read[token] += range(start, min(end, position + 1))
            slots[token].append(slot + index)
    for token, keys in enumerate(read):
        owner = int(np.searchsorted(batch.query_start, token, "right")) - 1
        position = int(batch.context_lens[owner] + token - batch.query_start[owner])
        assert sorted(keys) == list(range(position + 1))
        listed = work.part_slots[work.part_starts[token] : work.part_starts[token + 1]]
        assert sorted(listed.tolist()) == sorted(slots[token])
    assert sorted(work.part_slots.tolist()) == list(range(len(work.part_slots)))
    for items, most in zip((work.narrow_items, work.wide_items), num_queries, strict=True):
        assert (items[:, 5] - items[:, 4] <= most).all()


def forks(num_sequences: int = 8, context: int = 128) -> tuple:
    case = make_case([context] * num_sequences, [1] * num_sequences, block_size=16)
    case = share(case, [None] + [Sharing(0, 100)] * (num_sequences - 1))
    return case.batch, case.batch.shared_prefix(16)


def test_keys_with_few_queries_go_to_the_narrow_tiles() -> None:
    batch, plan = forks()
    work = make_work(batch, plan, 4, LIMITS, replace(LIMITS, num_queries=8, min_keys=128))
    assert work.wide_items.tolist() == [[0, 0, 128, 128, 0, 8, 8]]
    assert len(work.narrow_items) == 8
    all_narrow = make_work(batch, plan, 8, LIMITS, LIMITS)
    assert len(all_narrow.wide_items) == 0
    all_wide = make_work(batch, plan, 0, LIMITS, LIMITS)
    assert len(all_wide.narrow_items) == 0


@pytest.mark.parametrize(
    ("num_items", "min_keys", "expected"), [(1, 16, 1), (4, 16, 4), (100, 16, 8), (100, 64, 2)]
)
def test_long_runs_are_cut_for_all_cores_but_not_into_crumbs(
    num_items: int, min_keys: int, expected: int
) -> None:
    batch, plan = forks()
    wide = ItemLimits(8, 16, min_keys, num_items)
    assert len(make_work(batch, plan, 4, LIMITS, wide).wide_items) == expected


def test_a_block_that_all_share_is_in_one_item_for_all_its_queries() -> None:
    batch, plan = forks(num_sequences=9)
    work = make_work(batch, plan, 1, LIMITS, ItemLimits(16, 16, 16, 4))
    shared = [item for item in items_of(work) if item[1] < 128]
    assert sorted(item[1] for item in shared) == [0, 32, 64, 96]
    assert all(item[5] - item[4] == 9 for item in shared)
