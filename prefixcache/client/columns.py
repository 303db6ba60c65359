"""Columns of integers: what callers pass as tokens and counts, checked, without a loop per element.

Pure functions, no state. Every refusal is an InvalidArgumentError that names the field.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.errors import InvalidArgumentError
from prefixcache.types import TokenIds

UINT32_MAX = 2**32 - 1
_LISTS = frozenset((list, tuple, range))


def uint32(value: int, field: str) -> int:
    """One integer of 0 to 2^32 - 1."""
    return int(uint32_column([value], field)[0])


def uint32_column(values: npt.ArrayLike, field: str) -> TokenIds:
    """Integers of 0 to 2^32 - 1 as `[n] uint32`; may share memory with `values`.

    values: a list, a numpy array, a torch tensor, anything that numpy makes a one-dimensional
    array of. Booleans and floats are refused, whole numbers included.
    """
    if isinstance(values, (list, tuple, range)):
        return _from_ints(values, field)
    integers = _as_array(values, field)
    if integers.ndim != 1:
        raise InvalidArgumentError(field, f"must have one dimension, has {integers.ndim}")
    if integers.dtype.kind not in "iu":
        raise InvalidArgumentError(field, f"must hold integers, holds {integers.dtype}")
    if integers.dtype != np.uint32 and integers.size:
        lowest, highest = int(integers.min()), int(integers.max())
        if lowest < 0 or highest > UINT32_MAX:
            raise _out_of_range(field, lowest if lowest < 0 else highest)
    return integers.astype(np.uint32, copy=False)


def uint32_rows(rows: Sequence[Any], field: str) -> tuple[TokenIds, list[int]]:
    """The column of all rows' values, one row after the other, and the length of each row.

    Each row is as for `uint32_column`. Rows that are lists, or arrays of one dtype, are checked at
    once and not one by one.
    """
    kinds = set(map(type, rows))
    if kinds <= _LISTS:
        return _from_ints(list(chain.from_iterable(rows)), field), list(map(len, rows))
    if kinds == {np.ndarray}:
        # Of several dtypes numpy might make one of floats.
        with suppress(TypeError, ValueError):
            joined = np.concatenate(rows, dtype=rows[0].dtype, casting="no")
            return uint32_column(joined, field), list(map(len, rows))
    columns = [uint32_column(row, field) for row in rows]
    return np.concatenate(columns), list(map(len, columns))


def _from_ints(values: Sequence[Any], field: str) -> TokenIds:
    """`array` checks type and range of each element in C, and four times as fast as numpy."""
    try:
        integers = array("I", values)
    except TypeError as error:
        raise InvalidArgumentError(field, f"must hold integers: {error}") from None
    except OverflowError:
        bad = next(value for value in values if not 0 <= value <= UINT32_MAX)
        raise _out_of_range(field, bad) from None
    return np.frombuffer(integers, dtype=np.uint32)


def _as_array(values: Any, field: str) -> npt.NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        if values.is_floating_point():
            raise InvalidArgumentError(field, f"must hold integers, holds {values.dtype}")
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise InvalidArgumentError(field, f"is no column of integers: {error}") from None


def _out_of_range(field: str, value: int) -> InvalidArgumentError:
    return InvalidArgumentError(field, f"{value} is not in the range 0 to {UINT32_MAX}")
