"""Compiled Append and Commit: which rows they take, and that they do what the Python ones do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.core.native.append import append_batch
from prefixcache.core.native.commit import commit_rows
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.types import AppendResult, CacheUse, CommitResult, ExtraKeys, ResultCode
from tests.core.manager import ONE, TWO, A, Held, Manager, T, forked, image
from tests.support.invariants import check_invariants, snapshot


def append(manager: Manager, row: AppendRow) -> tuple[AppendResult, bool]:
    """The result, and whether the row was plain: the compiled part alone did it."""
    left: list[AppendRow] = []

    def leave(owner: bytes, row: AppendRow) -> AppendResult:
        left.append(row)
        return AppendResult(ResultCode.BUSY)

    sequences = manager.sequences
    batch, live = AppendBatch.of([row]), sequences.live.by_id
    grown: list[Any] = []
    (result,) = append_batch(
        manager.pool, sequences.hasher, live, ONE, batch, leave, grown.append
    ).results()
    is_long = not left and len(row.token_ids) >= manager.pool.block_size
    assert grown == [live.get(row.sequence_id)] * is_long
    check_invariants(sequences)
    return result, not left


def row_of(held: Held, tokens: Any, **options: Any) -> AppendRow:
    ids = np.asarray(tokens, dtype=np.uint32)
    return AppendRow(held.sequence_id, held.num_tokens, ids, **options)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_plain_tokens_are_appended_without_the_python_form(num_tokens: int, count: int) -> None:
    manager = Manager(12)
    held = manager.allocate(T(num_tokens))
    result, is_plain = append(manager, row_of(held, A(count)))
    assert is_plain
    assert result.code is ResultCode.OK
    record = manager.record(held)
    assert record.tokens(0, num_tokens + count).tolist() == T(num_tokens) + A(count)
    assert [*held.table, *result.new_block_ids] == manager.table(held)


def test_an_empty_object_for_no_extra_keys_is_plain_too() -> None:
    manager = Manager(4)
    assert append(manager, row_of(manager.allocate(T(2)), [5], extra_keys=ExtraKeys()))[1]


@pytest.mark.parametrize(
    "make_row",
    [
        lambda held: row_of(held, []),
        lambda held: row_of(held, [5], num_lookahead_tokens=1),
        lambda held: row_of(held, [5], num_kv_valid=1),
        lambda held: row_of(held, [5, 6], extra_keys=image("A", 6, 1)),
        lambda held: AppendRow(held.sequence_id, 5, np.array([5], dtype=np.uint32)),
        lambda held: AppendRow(held.sequence_id + 1, 6, np.array([5], dtype=np.uint32)),
        lambda held: row_of(held, range(11)),
    ],
    ids=[
        "no tokens",
        "lookahead",
        "drafts",
        "extra keys",
        "another position",
        "another sequence",
        "more blocks than are free",
    ],
)
def test_any_other_row_is_left_alone(make_row: Callable[[Held], AppendRow]) -> None:
    manager = Manager(4)
    held = manager.allocate(T(6))
    before = snapshot(manager.sequences)
    assert not append(manager, make_row(held))[1]
    assert snapshot(manager.sequences) == before


def test_a_row_of_a_sequence_in_another_state_is_left_alone() -> None:
    manager = Manager(20, num_layers=2)
    reserved = manager.allocate(T(6), num_lookahead_tokens=3)
    running = manager.allocate(A(6))
    manager.begin(0, running)
    parent, child = forked_with_storage(manager)
    others = manager.allocate([1], owner=TWO)
    before = snapshot(manager.sequences)
    for held in (reserved, running, parent, child, others):
        assert not append(manager, row_of(held, [5]))[1]
    assert snapshot(manager.sequences) == before


def forked_with_storage(manager: Manager) -> tuple[Held, Held]:
    held = manager.allocate([7] * 6)
    manager.attend(held)
    (child,) = manager.fork(held)
    return held, child


def test_a_row_of_a_sequence_that_still_holds_the_source_of_a_copy_is_left_alone() -> None:
    manager = Manager(8)
    _, child = forked(manager)
    assert manager.append(child, [5]).copies
    assert not append(manager, row_of(child, [6]))[1]


# ---- commit


def commit(manager: Manager, row: CommitRow) -> tuple[CommitResult, bool]:
    """The result, and whether the row was plain."""
    left: list[CommitRow] = []

    def leave(owner: bytes, row: CommitRow) -> CommitResult:
        left.append(row)
        return CommitResult(ResultCode.BUSY)

    sequences, size = manager.sequences, manager.pool.block_size
    (result,) = commit_rows(size, sequences.counters, sequences.live.by_id, ONE, [row], leave)
    check_invariants(sequences)
    return result, not left


def test_tokens_that_fill_no_block_are_committed_without_the_python_form() -> None:
    manager = Manager(12)
    held = manager.allocate(T(6))
    manager.commit(held, 4)
    manager.append(held, [5])
    assert commit(manager, CommitRow(held.sequence_id, 4, 3)) == (
        CommitResult(ResultCode.OK, 1),
        True,
    )
    assert manager.computed(held) == 7
    assert manager.sequences.counters.prefill_tokens_computed == 6
    registers_nothing = manager.allocate(A(6), cache_use=CacheUse.NONE)
    assert commit(manager, CommitRow(registers_nothing.sequence_id, 0, 6)) == (
        CommitResult(ResultCode.OK, 0),
        True,
    )


@pytest.mark.parametrize(
    ("start", "count"), [(0, 4), (0, 0), (1, 1), (0, 7)], ids=["block", "none", "place", "beyond"]
)
def test_any_other_commit_is_left_alone(start: int, count: int) -> None:
    manager = Manager(12)
    held, others = manager.allocate(T(6)), manager.allocate([1], owner=TWO)
    before = snapshot(manager.sequences)
    assert not commit(manager, CommitRow(held.sequence_id, start, count))[1]
    assert not commit(manager, CommitRow(held.sequence_id + 1, 0, 1))[1]
    assert not commit(manager, CommitRow(others.sequence_id, 0, 1))[1]
    assert snapshot(manager.sequences) == before


def test_a_commit_before_which_the_source_of_a_copy_is_let_go_is_left_alone() -> None:
    manager = Manager(8)
    _, child = forked(manager)
    assert manager.append(child, [5]).copies
    assert not commit(manager, CommitRow(child.sequence_id, 6, 1))[1]


# ---- both, at random


def draw_append(rng: random.Random, held: Held) -> AppendRow:
    tokens = [rng.randrange(3) for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 5)))]
    return AppendRow(
        held.sequence_id,
        max(0, held.num_tokens - rng.choice((0,) * 9 + (1,))),
        np.array(tokens, dtype=np.uint32),
        rng.choice((0,) * 9 + (len(tokens),)),
        rng.choice((0,) * 9 + (2,)),
    )


def draw_commit(rng: random.Random, held: Held, computed: int) -> CommitRow:
    start = max(0, computed - rng.choice((0,) * 9 + (1,)))
    return CommitRow(held.sequence_id, start, rng.choice((0, 1, 1, 1, 2, held.num_tokens - start)))


Call = Callable[[Manager, Any], Any]


class Twin:
    """A manager and its sequences in the order of their making; ids are random."""

    def __init__(self, seed: int, append: Call, commit: Call) -> None:
        rng = random.Random(seed)
        self.commit = commit
        self.last: tuple[Call, AppendRow | CommitRow] | None = None
        algorithm = list(HASH_ALGORITHMS.values())[seed % len(HASH_ALGORITHMS)]
        self.manager = Manager(
            rng.randrange(8, 30),
            rng.choice((1, 2, 4)),
            algorithm=algorithm,
            verify_hits=not algorithm.is_cryptographic,
        )
        self.append = append
        self.held: list[Held] = []

    def step(self, rng: random.Random) -> Any:
        manager, action = self.manager, rng.randrange(10)
        if action < 2 or not self.held:
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
            if manager.lookup(tokens).num_blocks_needed > manager.pool.num_free:
                return None
            self.held.append(manager.allocate(tokens))
            return self.held[-1].table
        held = rng.choice(self.held)
        if action == 2:
            self.held.remove(held)
            return manager.free(held)
        if action == 3 and manager.computed(held) < held.num_tokens:
            return manager.attend(held, num_tokens=1)
        if action == 4 and self.last is not None:
            call, row = self.last
        elif action < 7:
            call, row = self.commit, draw_commit(rng, held, manager.computed(held))
        else:
            call, row = self.append, draw_append(rng, held)
        self.last = call, row
        result = call(manager, row)
        for one in self.held:
            one.num_tokens = manager.record(one).num_tokens
        return result

    def state(self) -> dict[str, Any]:
        state = snapshot(self.manager.sequences)
        return state | {"sequences": [progress[1:] for progress in state["sequences"]]}


@pytest.mark.parametrize("seed", range(30))
def test_random_rows_do_what_they_do_in_python(seed: int) -> None:
    compiled = Twin(
        seed,
        lambda manager, row: manager.sequences.rows.append(ONE, AppendBatch.of([row])).results()[0],
        lambda manager, row: manager.sequences.rows.commit(ONE, [row])[0],
    )
    python = Twin(
        seed,
        lambda manager, row: manager.sequences.rows._append_row(ONE, row),
        lambda manager, row: manager.sequences.rows._commit_row(ONE, row),
    )
    for step in range(300):
        results = [twin.step(random.Random(f"{seed} {step}")) for twin in (compiled, python)]
        assert results[0] == results[1]
        assert compiled.state() == python.state()
    check_invariants(compiled.manager.sequences)
