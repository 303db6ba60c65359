import json
import math
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.fixed_scales import FixedScales, read_scale_file


def test_a_file_has_one_number_a_layer_for_k_and_for_v(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"v": [1, 2e-3], "k": [0.5, 4.0]}))
    assert read_scale_file(path, 2) == FixedScales((0.5, 4.0), (1, 2e-3))


def test_scales_of_one_leave_numbers_as_they_are() -> None:
    assert FixedScales.ones(2) == FixedScales((1.0, 1.0), (1.0, 1.0))


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"\xff",
        b"{",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"k": [1, 1]}',
        b'{"k": [1, 1], "v": [1, 1], "q": [1, 1]}',
        b'{"k": [1, 1], "v": 1}',
        b'{"k": [1, 1], "v": [1, "1"]}',
        b'{"k": [1, 1], "v": [1, true]}',
        b'{"k": [1, 1], "v": [1, null]}',
        b'{"k": [1, 1], "v": [1]}',
        b'{"k": [1, 1, 1], "v": [1, 1]}',
        b'{"k": [1, 0], "v": [1, 1]}',
        b'{"k": [1, 1], "v": [1, -1]}',
        b'{"k": [1, 1], "v": [1, NaN]}',
        b'{"k": [1, 1], "v": [1, Infinity]}',
        b'{"k": [1, 1e39], "v": [1, 1]}',
        b'{"k": [1, 1e-39], "v": [1, 1]}',
        b'{"k": [1, 1' + b"0" * 400 + b'], "v": [1, 1]}',
    ],
)
def test_another_file_is_refused_by_its_path(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"scales\.json") as refusal:
        read_scale_file(path, 2)
    assert refusal.value.field == "kv_scale_file"


@pytest.mark.parametrize(
    ("keys", "values"),
    [((1.0,), ()), ((0.0,), (1.0,)), ((1.0,), (math.nan,)), ((1.0,), (-1.0,))],
)
def test_scales_that_cannot_divide_are_refused(
    keys: tuple[float, ...], values: tuple[float, ...]
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        FixedScales(keys, values)
    assert refusal.value.field == "fixed_scales"
