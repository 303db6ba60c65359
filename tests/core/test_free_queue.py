"""The free queue of the form in use, against a plain list."""

from __future__ import annotations

import importlib
import random

import numpy as np
import pytest

from prefixcache.core.form import FORM

FreeQueue = importlib.import_module(f"prefixcache.core.{FORM}.free_queue").FreeQueue


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def test_a_new_queue_holds_all_blocks_in_the_order_of_their_ids() -> None:
    queue = FreeQueue(5)
    assert queue.order().tolist() == [0, 1, 2, 3, 4]
    assert len(queue) == 5
    assert 4 in queue


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8, 64, 100])
def test_random_calls_leave_the_order_that_a_list_has(num_blocks: int) -> None:
    """Long enough that the ring wraps and is squeezed many times."""
    rng = random.Random(num_blocks)
    queue, model = FreeQueue(num_blocks), list(range(num_blocks))
    outside: list[int] = []
    for _ in range(3000):
        action = rng.choice(("pop", "tail", "head", "remove", "peek"))
        if action == "pop":
            count = rng.randint(0, len(model))
            assert queue.pop_head(count).tolist() == model[:count]
            outside += model[:count]
            model = model[count:]
        elif action == "peek":
            count = rng.randint(0, len(model))
            assert queue.peek_head(count).tolist() == model[:count]
        elif action == "remove":
            gone = rng.sample(model, rng.randint(0, len(model)))
            queue.remove(ids(gone))
            model = [block for block in model if block not in gone]
            outside += gone
        else:
            rng.shuffle(outside)
            count = rng.randint(0, len(outside))
            added, outside = outside[:count], outside[count:]
            if action == "tail":
                queue.push_tail(ids(added))
                model = model + added
            else:
                queue.push_head(ids(added))
                model = added + model
        assert queue.order().tolist() == model
        assert len(queue) == len(model)
        assert all((block in queue) == (block in model) for block in range(num_blocks))


def test_peek_changes_nothing() -> None:
    queue = FreeQueue(6)
    queue.remove(ids([0, 2]))
    assert queue.peek_head(3).tolist() == [1, 3, 4]
    assert queue.order().tolist() == [1, 3, 4, 5]


def test_pop_passes_over_long_runs_of_removed_blocks() -> None:
    queue = FreeQueue(1000)
    queue.remove(ids(list(range(900))))
    assert queue.pop_head(2).tolist() == [900, 901]
    queue.push_head(ids([5, 3]))
    assert queue.pop_head(3).tolist() == [5, 3, 902]


def test_using_one_block_over_and_over_keeps_the_others_in_order() -> None:
    queue = FreeQueue(3)
    for _ in range(10_000):
        queue.remove(ids([1]))
        queue.push_tail(ids([1]))
    assert queue.order().tolist() == [0, 2, 1]
