"""The compiled form of batches equals the numpy form, whatever it is given."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from prefixcache.attention.batch import AttentionBatch, make_batch, make_batch_in_numpy
from prefixcache.attention.checks import check_batch, check_batch_in_numpy
from prefixcache.attention.native.batch import agrees, make_arrays
from prefixcache.errors import InvalidArgumentError

ARRAYS = [field.name for field in fields(AttentionBatch)][:5]
COUNTS = st.integers(-1, 20) | st.sampled_from([2**31 - 1, 2**31, 2**63])
BLOCK_IDS = st.integers(0, 30) | st.just(2**31 - 1)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Any, ...]:
    """Of `make_batch`: mostly right, or nearly."""
    num_sequences, block_size = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    tables, columns = [], ([], [], [])
    for _ in range(num_sequences):
        table = draw(st.lists(BLOCK_IDS, max_size=6))
        tables.append(np.array(table, draw(st.sampled_from([np.int32] * 7 + [np.int64]))))
        room = len(table) * block_size
        context = draw(st.integers(0, room))
        columns[0].append(context)
        columns[1].append(draw(st.integers(0, room - context)))
        columns[2].append(draw(st.integers(0, room + 1)))
    if num_sequences and draw(st.integers(0, 3)) == 0:
        wrong = draw(st.sampled_from(columns))
        wrong[draw(st.integers(0, num_sequences - 1))] = draw(COUNTS)
        if draw(st.booleans()):
            wrong.pop()
    return tables, *columns, block_size


def result(function: Any, *given: Any) -> Any:
    try:
        return function(*given)
    except (InvalidArgumentError, OverflowError) as error:
        return type(error), str(error)


@settings(max_examples=500, deadline=None)
@given(arguments())
def test_the_same_arrays_or_the_same_refusal(given: tuple[Any, ...]) -> None:
    made, expected = result(make_batch, *given), result(make_batch_in_numpy, *given)
    event("made" if isinstance(made, AttentionBatch) else "refused")
    if not isinstance(expected, AttentionBatch):
        assert made == expected
        return
    for name in ARRAYS:
        array, wanted = getattr(made, name), getattr(expected, name)
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert array.tolist() == wanted.tolist()


def test_what_it_makes_is_what_the_launchers_get() -> None:
    table = np.array([4, 2], np.int32)
    made = make_arrays([table], [3], [2], [4], 4)
    assert [array.tolist() for array in made] == [[[4, 2]], [0, 2], [3], [5], [-1, 8]]
    # Strides of any kind, and rows of another array.
    assert make_arrays([np.array([[4, 0], [2, 0]], np.int32)[:, 0]], [3], [2], [4], 4) is not None
    assert make_arrays([table], [3], [6], [4], 4) is None
    assert make_arrays([table.astype(np.int64)], [3], [2], [4], 4) is None
    assert make_arrays([table], [2**63], [2], [4], 4) is None


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_the_same_batches_are_refused(data: st.DataObject) -> None:
    """Batches that are right but for one entry or one array, if at all."""
    tables = [np.array(data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=5)), np.int32)]
    tables.append(tables[0][::-1])
    batch = make_batch(tables, [2, 0], [3, data.draw(st.integers(0, 6))], [0, 0], 2)
    name = data.draw(st.sampled_from(ARRAYS[:4]))
    array = getattr(batch, name).copy()
    change = data.draw(st.sampled_from(["entry", "type", "shape", "nothing"]))
    if change == "entry":
        place = data.draw(st.integers(0, array.size - 1))
        array.flat[place] = data.draw(st.integers(-2, 12) | st.sampled_from([2**31 - 1, -(2**31)]))
    elif change == "type":
        array = array.astype(data.draw(st.sampled_from([np.int64, np.uint32, np.float32])))
    elif change == "shape":
        array = data.draw(st.sampled_from([array[:-1], array[None], array.reshape(-1)]))
    changed = replace(batch, **{name: array})
    sizes = (int(batch.query_start[-1]), data.draw(st.integers(8, 11)), 2)
    expected = result(check_batch_in_numpy, changed, *sizes)
    event("right" if expected is None else "refused")
    assert result(check_batch, changed, *sizes) == expected
    assert agrees(changed, *sizes) == (expected is None)


@pytest.mark.parametrize("num_tokens", [4, 6])
def test_a_batch_of_other_tokens_does_not_agree(num_tokens: int) -> None:
    batch = make_batch([np.array([4, 2], np.int32)], [3], [5], [0], 4)
    assert agrees(batch, 5, 5, 4)
    assert not agrees(batch, num_tokens, 5, 4)
