"""The columns of an Append are refused or taken alike by compiled code and by Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.server import checks

MAX_TOKENS, MAX_ROWS, BLOCK_SIZE = 60, 300, 4


def column(values: list[int], dtype: str = "<u4") -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def a_request(rng: random.Random) -> Any:
    """One that is good, or has something wrong, or two things."""
    num_rows = rng.choice([1, 2, 3, 20, 255, 256, 257, 300])
    lengths = [rng.randrange(3) if num_rows < 30 else 0 for _ in range(num_rows)]
    request = SimpleNamespace(
        sequence_ids=column([rng.getrandbits(64) for _ in range(num_rows)], "<u8"),
        start_positions=column([rng.getrandbits(32) for _ in range(num_rows)]),
        num_tokens=column(lengths),
        token_ids=column([rng.getrandbits(32) for _ in range(sum(lengths))]),
        num_kv_valid=column([rng.randrange(length + 1) for length in lengths]),
        num_lookahead_tokens=column([rng.randrange(2) if num_rows < 30 else 0 for _ in lengths]),
        extra_keys=(),
    )
    for _ in range(rng.choice([0, 0, 1, 2])):
        spoil(request, rng)
    return request


def spoil(request: Any, rng: random.Random) -> None:
    name = rng.choice(list(vars(request))[:-1])
    values = np.frombuffer(getattr(request, name), dtype="<u8" if name == "sequence_ids" else "<u4")
    changed = values.tolist()
    at = rng.randrange(len(changed) or 1)
    match rng.choice(["drop", "more", "twice", "empty", "large", "zero"]):
        case "drop":
            del changed[at : at + 1]
        case "more":
            changed.append(5)
        case "twice":
            changed[at : at + 1] = changed[:1]
        case "empty":
            changed.clear()
        case "large":
            changed[at : at + 1] = [2**32 - 1]
        case "zero":
            changed[at : at + 1] = [0]
    setattr(request, name, column(changed, values.dtype.str))


def outcome(request: Any) -> Any:
    try:
        return checks.append_batch(request, BLOCK_SIZE, MAX_TOKENS, MAX_ROWS)
    except InvalidArgumentError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(20))
def test_columns_are_taken_or_refused_as_by_python(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    requests = [a_request(rng) for _ in range(100)]
    found = list(map(outcome, requests))
    monkeypatch.setattr(checks, "_columns_agree", None)
    assert found == list(map(outcome, requests))
    refused = [one for one in found if isinstance(one, str)]
    assert 0 < len(refused) < len(found)


@pytest.mark.parametrize("at", [0, 1, 77, 254])
@pytest.mark.parametrize("value", [0, 1, 2**64 - 1, 0x9E3779B97F4A7C15])
def test_an_id_that_stands_twice_is_found_wherever_it_is(at: int, value: int) -> None:
    ids = [2**32 + index for index in range(256)]
    ids[at] = ids[255] = value
    request = SimpleNamespace(
        sequence_ids=column(ids, "<u8"),
        start_positions=bytes(4 * 256),
        num_tokens=bytes(4 * 256),
        token_ids=b"",
        num_kv_valid=b"",
        num_lookahead_tokens=b"",
        extra_keys=(),
    )
    assert "twice" in outcome(request)
