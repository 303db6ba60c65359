"""The scales that a cache quantised with one scale a tensor is written with. Imports no torch.

They are known before any token is: from a calibration of the model, kept in a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from prefixcache.errors import InvalidArgumentError

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of normal float32 numbers


@dataclass(frozen=True, slots=True)
class FixedScales:
    """What K and V of each layer are divided by before they are rounded.

    keys, values: one number a layer, each a normal positive float32. Raises InvalidArgumentError.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values):
            raise InvalidArgumentError(
                "fixed_scales", f"{len(self.keys)} numbers for K, {len(self.values)} for V"
            )
        for scale in (*self.keys, *self.values):
            if not _SMALLEST <= scale <= _LARGEST:
                raise InvalidArgumentError(
                    "fixed_scales", f"must be from {_SMALLEST} to {_LARGEST}, has {scale}"
                )

    @classmethod
    def ones(cls, num_layers: int) -> FixedScales:
        """Every number stored as it is."""
        return cls((1.0,) * num_layers, (1.0,) * num_layers)


def read_scale_file(path: Path, num_layers: int) -> FixedScales:
    """Read `{"k": [...], "v": [...]}`, one number a layer, from a JSON file.

    Raises InvalidArgumentError, with the field `kv_scale_file`, if it is anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_int=float)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError("kv_scale_file", f"{path}: {error}") from error
    if not isinstance(content, dict) or content.keys() != {"k", "v"}:
        raise InvalidArgumentError("kv_scale_file", f'{path}: not a JSON object of "k" and "v"')
    for name, numbers in content.items():
        if not isinstance(numbers, list) or not all(type(n) is float for n in numbers):
            raise InvalidArgumentError("kv_scale_file", f"{path}: {name} is no list of numbers")
        if len(numbers) != num_layers:
            raise InvalidArgumentError(
                "kv_scale_file",
                f"{path}: {name} has {len(numbers)} numbers, the model has {num_layers} layers",
            )
    try:
        return FixedScales(tuple(content["k"]), tuple(content["v"]))
    except InvalidArgumentError as error:
        problem = error.message.removeprefix(f"{error.field}: ")
        raise InvalidArgumentError("kv_scale_file", f"{path}: {problem}") from error
