"""Layers of a step share the object; whatever else changes makes another, equal to `make_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.step_batches import NUM_STEPS, StepBatches
from prefixcache.errors import InvalidArgumentError

BLOCK_SIZE = 4


def table(*block_ids: int) -> npt.NDArray[np.int32]:
    return np.array(block_ids, dtype=np.int32)


STEP = {
    "sequence_ids": [7, 2**64 - 1],
    "block_tables": [table(3, 9), table(1)],
    "start_positions": [5, 2],
    "num_tokens": [1, 2],
    "first_writable": [0, 0],
}
CHANGES = {
    "sequence_ids": [8, 2**64 - 1],
    "block_tables": [table(3, 8), table(1)],
    "start_positions": [4, 2],
    "num_tokens": [2, 2],
    "first_writable": [6, 0],
}


def assert_equal(batch: AttentionBatch, expected: AttentionBatch) -> None:
    for name in ("block_tables", "query_start", "context_lens", "seq_lens", "slot_mapping"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))


def made(step: dict[str, Sequence[object]]) -> AttentionBatch:
    return make_batch(
        *(step[name] for name in list(STEP)[1:]),
        block_size=BLOCK_SIZE,
    )


def test_layers_of_one_step_share_one_batch() -> None:
    batches = StepBatches(BLOCK_SIZE)
    first = batches.batch_for(**STEP)
    assert_equal(first, made(STEP))
    for _ in range(30):
        copies = [own.copy() for own in STEP["block_tables"]]
        assert batches.batch_for(**(STEP | {"block_tables": copies})) is first


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_differs_anywhere_has_a_batch_of_its_own(name: str) -> None:
    batches = StepBatches(BLOCK_SIZE)
    first = batches.batch_for(**STEP)
    changed = STEP | {name: CHANGES[name]}
    second = batches.batch_for(**changed)
    assert second is not first
    assert_equal(second, made(changed))
    assert batches.batch_for(**changed) is second
    assert_equal(batches.batch_for(**STEP), made(STEP))


def test_tables_are_told_apart_by_where_each_ends() -> None:
    """The same ids in the same order, split between the sequences in another way."""
    batches = StepBatches(1)
    for tables in ([table(5), table(6, 7)], [table(5, 6), table(7)]):
        batch = batches.batch_for([1, 2], tables, [0, 0], [1, 1], [0, 0])
        assert batch.block_tables.tolist() == [[tables[0][0]], [tables[1][0]]]


def test_steps_of_several_engines_keep_their_batches_side_by_side() -> None:
    batches = StepBatches(BLOCK_SIZE)
    steps = [STEP | {"sequence_ids": [number, 99]} for number in range(NUM_STEPS)]
    firsts = [batches.batch_for(**step) for step in steps]
    for _ in range(3):
        for step, first in zip(steps, firsts, strict=True):
            assert batches.batch_for(**step) is first


def test_the_step_that_was_not_used_for_longest_is_forgotten() -> None:
    batches = StepBatches(BLOCK_SIZE)
    steps = [STEP | {"sequence_ids": [number, 99]} for number in range(NUM_STEPS + 1)]
    firsts = [batches.batch_for(**step) for step in steps[:-1]]
    assert batches.batch_for(**steps[0]) is firsts[0]
    batches.batch_for(**steps[-1])
    assert batches.batch_for(**steps[0]) is firsts[0]
    assert batches.batch_for(**steps[1]) is not firsts[1]


def test_bad_input_is_refused_and_not_remembered() -> None:
    batches = StepBatches(BLOCK_SIZE)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="block_tables"):
            batches.batch_for(**(STEP | {"num_tokens": [4, 2]}))
    assert_equal(batches.batch_for(**STEP), made(STEP))


def test_threads_get_the_batch_of_their_own_step() -> None:
    batches = StepBatches(BLOCK_SIZE)

    def run(number: int) -> None:
        step = STEP | {"block_tables": [table(number, 50), table(number)]}
        for layer in range(200):
            batch = batches.batch_for(**(step | {"sequence_ids": [layer % 3, number]}))
            assert batch.block_tables.tolist() == [[number, 50], [number, -1]]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
