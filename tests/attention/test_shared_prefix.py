"""The plan of shared runs against a trie that is built one block after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from prefixcache.attention import batch as batch_module
from prefixcache.attention.batch import AttentionBatch, PrefixSharing, make_batch
from prefixcache.attention.shared_prefix import (
    MAX_QUERY_TOKENS,
    MIN_SAVED_TOKENS,
    SharedPrefix,
    plan_shared_prefix,
)


def batch_of(
    tables: Sequence[Sequence[int]], contexts: Sequence[int], queries: Sequence[int], block: int
) -> AttentionBatch:
    arrays = [np.array(table, np.int32) for table in tables]
    return make_batch(arrays, contexts, queries, [0] * len(tables), block)


@dataclass(frozen=True)
class Run:
    """What a plan's run means, whatever its place in the arrays."""

    blocks: tuple[int, ...]
    start: int
    sequences: frozenset[int]


def runs_of(plan: SharedPrefix | None, batch: AttentionBatch, block: int) -> set[Run]:
    """The runs, with the sequences that their query tokens belong to."""
    if plan is None:
        return set()
    runs = []
    for index, named in enumerate(plan.run_sequences.tolist()):
        first, end = int(plan.run_starts[index]), int(plan.run_ends[index])
        assert first % block == end % block == 0
        tokens = plan.query_tokens[plan.run_first_queries[index] : plan.run_end_queries[index]]
        sequences = np.searchsorted(batch.query_start, tokens, "right") - 1
        members = frozenset(sequences.tolist())
        whole = [tokens_of(sequence, batch) for sequence in dict.fromkeys(sequences.tolist())]
        assert tokens.tolist() == list(itertools.chain(*whole))  # each together and in order
        for member in members:
            table = batch.block_tables[member]
            assert end <= batch.context_lens[member]
            assert (table[: end // block] == batch.block_tables[named][: end // block]).all()
        blocks = batch.block_tables[named, first // block : end // block]
        runs.append(Run(tuple(blocks.tolist()), first, members))
    assert len(set(runs)) == len(runs)
    return set(runs)


def tokens_of(sequence: int, batch: AttentionBatch) -> range:
    return range(*batch.query_start[sequence : sequence + 2].tolist())


def naive_runs(batch: AttentionBatch, block: int, min_saved: float) -> Iterator[Run]:
    query_lens = np.diff(batch.query_start)
    members = [s for s, n in enumerate(query_lens.tolist()) if 1 <= n <= MAX_QUERY_TOKENS]

    def usable(sequence: int) -> list[int]:
        return batch.block_tables[sequence, : batch.context_lens[sequence] // block].tolist()

    def grow(members: list[int], start: int, depth: int) -> Iterator[Run]:
        """The runs of members that agree in `depth` blocks, of which a run has covered `start`."""
        while all(len(usable(s)) > depth for s in members):
            if len({usable(s)[depth] for s in members}) > 1:
                break
            depth += 1
        saved = (len(members) - 1) * (depth - start) * block
        if depth > start and saved >= min_saved * sum(query_lens[members]):
            blocks = usable(members[0])[start:depth]
            yield Run(tuple(blocks), start * block, frozenset(members))
            start = depth
        yield from split(members, start, depth)

    def split(members: list[int], start: int, depth: int) -> Iterator[Run]:
        children: dict[int, list[int]] = {}
        for sequence in members:
            if len(usable(sequence)) > depth:
                children.setdefault(usable(sequence)[depth], []).append(sequence)
        for child in children.values():
            if len(child) > 1:
                yield from grow(child, start, depth)

    return split(members, 0, 0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[AttentionBatch, int]:
    """Sequences that continue, fork and copy each other; few block ids, so that some coincide."""
    block = draw(st.integers(1, 5))
    ids = st.integers(0, 5)
    tables: list[list[int]] = []
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from(tables)) if tables and draw(st.booleans()) else []
        kept = draw(st.integers(0, len(parent)))
        tables.append([*parent[:kept], *draw(st.lists(ids, min_size=2, max_size=6))])
    contexts, queries = [], []
    for table in tables:
        length = draw(st.integers(0, len(table) * block))
        query = draw(st.sampled_from([0, 1, 1, 1, 2, 5, MAX_QUERY_TOKENS, MAX_QUERY_TOKENS + 1]))
        queries.append(min(query, length))
        contexts.append(length - min(query, length))
    return batch_of(tables, contexts, queries, block), block


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches(), st.sampled_from([0, 1, 2, 3, 8]))
def test_the_runs_are_those_of_the_naive_trie(
    case: tuple[AttentionBatch, int], min_saved: int
) -> None:
    batch, block = case
    plan = plan_shared_prefix(batch, block, min_saved)
    assert runs_of(plan, batch, block) == set(naive_runs(batch, block, min_saved))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches(), st.sampled_from([0, 2]))
def test_every_key_of_every_sequence_is_in_one_place(
    case: tuple[AttentionBatch, int], min_saved: int
) -> None:
    batch, block = case
    plan = plan_shared_prefix(batch, block, min_saved)
    if plan is None:
        return
    read = [list[int]() for _ in batch.seq_lens]
    flat = tree = 0
    for run in runs_of(plan, batch, block):
        keys = range(run.start, run.start + len(run.blocks) * block)
        assert len(run.sequences) > 1
        tree += len(keys)
        flat += len(keys) * len(run.sequences)
        for sequence in run.sequences:
            read[sequence] += keys
    for keys, start in zip(read, plan.private_starts.tolist(), strict=True):
        assert sorted(keys) == list(range(start))
    assert plan.saved_tokens == flat - tree > 0
    sharing = [tokens_of(s, batch) for s in plan.private_starts.nonzero()[0]]
    assert sorted(plan.query_tokens.tolist()) == sorted(t for tokens in sharing for t in tokens)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batches())
def test_a_run_stands_before_those_that_continue_it(case: tuple[AttentionBatch, int]) -> None:
    batch, block = case
    plan = plan_shared_prefix(batch, block, 0)
    ends = np.zeros(len(batch.query_start), int)
    for index in range(0 if plan is None else len(plan.run_starts)):
        tokens = slice(plan.run_first_queries[index], plan.run_end_queries[index])
        owners = np.searchsorted(batch.query_start, plan.query_tokens[tokens], "right") - 1
        assert (ends[owners] == plan.run_starts[index]).all()
        ends[owners] = plan.run_ends[index]


def test_a_system_prompt_two_conversations_and_a_stranger() -> None:
    tables = [[1, 2, 3, 10], [1, 2, 5, 6, 11], [7, 2, 3, 12], [1, 2, 3, 13], [1, 2, 5, 6, 14]]
    batch = batch_of(tables, [12, 17, 13, 14, 16], [1, 2, 1, 1, 3], block=4)
    plan = plan_shared_prefix(batch, 4, 0)
    assert plan is not None
    assert runs_of(plan, batch, 4) == {
        Run((1, 2), 0, frozenset({0, 1, 3, 4})),
        Run((3,), 8, frozenset({0, 3})),
        Run((5, 6), 8, frozenset({1, 4})),
    }
    assert plan.private_starts.tolist() == [12, 16, 0, 12, 16]
    assert plan.saved_tokens == 3 * 8 + 4 + 8


@pytest.mark.parametrize(
    "tables",
    [
        [],
        [[0, 1]],
        [[0, 1], [1, 0], [2, 1]],
        [[0, 3, 4], [1, 3, 4]],  # equal from the second block on only
    ],
)
def test_where_no_first_blocks_are_equal_there_is_no_plan(tables: list[list[int]]) -> None:
    lengths = [len(table) * 4 - 1 for table in tables]
    assert plan_shared_prefix(batch_of(tables, lengths, [1] * len(tables), 4), 4, 0) is None


def test_without_shared_first_blocks_nothing_else_of_the_batch_is_looked_at() -> None:
    batch = batch_of([[0, 1], [1, 0]], [7, 7], [1, 1], 4)
    assert plan_shared_prefix(replace(batch, query_start=None, context_lens=None), 4) is None


def test_a_block_with_a_new_token_is_not_shared() -> None:
    """As the last block of a full hit, whose last token is computed again and not written."""
    batch = batch_of([[0, 1], [0, 1]], [7, 7], [1, 1], block=4)
    plan = plan_shared_prefix(batch, 4, 0)
    assert plan is not None
    assert plan.run_ends.tolist() == [4]


def test_forks_share_their_whole_tables() -> None:
    batch = batch_of([[4, 2, 9]] * 3, [12] * 3, [0] * 3, block=4)
    appended = replace(
        batch,
        block_tables=np.array([[4, 2, 9, 1], [4, 2, 9, 0], [4, 2, 9, 3]], np.int32),
        query_start=np.arange(4, dtype=np.int32),
        seq_lens=batch.seq_lens + 1,
    )
    plan = plan_shared_prefix(appended, 4, 0)
    assert plan is not None
    assert runs_of(plan, appended, 4) == {Run((4, 2, 9), 0, frozenset({0, 1, 2}))}
    assert plan.private_starts.tolist() == [12, 12, 12]


def test_unused_entries_may_be_anything() -> None:
    """Those of the second would put it between the first and the third, which share more."""
    tables = np.array([[0, 1, 4, 9], [0, 1, 5, 9], [0, 1, 6, 9], [0, 1, 5, 9]], np.int32)
    batch = AttentionBatch(
        block_tables=tables,
        query_start=np.arange(5, dtype=np.int32),
        context_lens=np.array([8, 4, 9, 7], np.int32),
        seq_lens=np.array([9, 5, 10, 8], np.int32),
        slot_mapping=np.zeros(4, np.int64),
    )
    assert runs_of(plan_shared_prefix(batch, 4, 0), batch, 4) == {
        Run((0,), 0, frozenset({0, 1, 2, 3})),
        Run((1,), 4, frozenset({0, 2})),
    }


def test_a_run_that_saves_too_little_becomes_a_part_of_those_that_continue_it() -> None:
    """16 tokens for four sequences save less than 64 a query; 16 + 112 for two of them do not."""
    long = [1, 2, 3, 4, 5, 6, 7]
    tables = [[0, *long, 20], [0, *long, 21], [0, 22], [0, 23]]
    batch = batch_of(tables, [128, 128, 16, 16], [1] * 4, block=16)
    assert 4 * MIN_SAVED_TOKENS > 3 * 16
    assert 2 * MIN_SAVED_TOKENS <= 16 + 112
    plan = plan_shared_prefix(batch, 16)
    assert runs_of(plan, batch, 16) == {Run((0, *long), 0, frozenset({0, 1}))}
    assert plan is not None
    assert plan.private_starts.tolist() == [128, 128, 0, 0]


def test_long_chunks_and_empty_queries_take_no_part() -> None:
    tables = [[0, 1, 2, 3, 4, 5 + row] for row in range(4)]
    batch = batch_of(tables, [20, 4, 20, 20], [1, MAX_QUERY_TOKENS + 1, 0, 2], block=4)
    assert runs_of(plan_shared_prefix(batch, 4, 0), batch, 4) == {
        Run((0, 1, 2, 3, 4), 0, frozenset({0, 3}))
    }


def test_the_highest_ids_and_positions_do_not_wrap_round() -> None:
    highest = 2**31 - 1
    tables = [[highest, highest - 1], [highest, highest - 2]]
    batch = batch_of(tables, [2**20, 2**20], [1, 1], block=2**20)
    plan = plan_shared_prefix(batch, 2**20)
    assert plan is not None
    assert (plan.run_ends.tolist(), plan.saved_tokens) == ([2**20], 2**20)


def test_the_plan_cannot_be_changed() -> None:
    plan = plan_shared_prefix(batch_of([[0, 1], [0, 2]], [4, 4], [1, 1], 4), 4, 0)
    assert plan is not None
    with pytest.raises(ValueError, match="read-only"):
        plan.private_starts[0] = 0


def test_a_batch_plans_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def plan(*arguments: object, **rest: object) -> SharedPrefix | None:
        calls.append(arguments)
        return plan_shared_prefix(*arguments, **rest)

    monkeypatch.setattr(batch_module, "plan_shared_prefix", plan)
    sharing = batch_of([[0, 1], [0, 2]], [128, 128], [1, 1], 128)
    assert sharing.shared_prefix(128) is sharing.shared_prefix(128) is not None
    alone = batch_of([[0, 1]], [128], [1], 128)
    assert alone.shared_prefix(128) is alone.shared_prefix(128) is None
    assert len(calls) == 2
    changed = replace(sharing, block_tables=alone.block_tables.repeat(2, 0))
    assert changed.shared_prefix(128) is not sharing.shared_prefix(128)


def test_sharing_can_be_forced_and_ruled_out() -> None:
    little = batch_of([[0, 1], [0, 2]], [4, 4], [1, 1], 4)
    assert little.shared_prefix(4) is None
    assert replace(little, prefix_sharing=PrefixSharing.ALWAYS).shared_prefix(4) is not None
    much = batch_of([[0, 1], [0, 2]], [128, 128], [1, 1], 128)
    assert much.shared_prefix(128) is not None
    assert replace(much, prefix_sharing=PrefixSharing.NEVER).shared_prefix(128) is None
