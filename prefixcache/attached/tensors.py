"""Tensors of the caller as torch has them, without a copy where they are dense. No state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from prefixcache.client.tensors import TensorT
from prefixcache.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class TensorKind:
    """dtype: "float32", "float16", "bfloat16" or what else torch calls it."""

    dtype: str
    shape: tuple[int, ...]


def as_torch(tensor: object, field: str) -> torch.Tensor:
    """Dense, and for reading only. Raises InvalidArgumentError for another kind of object."""
    if isinstance(tensor, torch.Tensor):
        return tensor.detach().contiguous()
    if not isinstance(tensor, np.ndarray) or tensor.dtype.kind not in "biuf":
        kind = f"array of {tensor.dtype}" if isinstance(tensor, np.ndarray) else type(tensor)
        raise InvalidArgumentError(field, f"must be a numpy array or a torch tensor, is {kind}")
    native: np.ndarray[Any, Any] = tensor.astype(tensor.dtype.newbyteorder("="), copy=False)
    # Torch wants memory that may be written to.
    return torch.from_numpy(np.require(native, requirements=("C", "W")))


def kind_of(tensor: torch.Tensor) -> TensorKind:
    return TensorKind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def shaped_like(example: TensorT, out: torch.Tensor) -> TensorT:
    """The tensor as the kind of object that `example` is."""
    return cast(TensorT, out.numpy() if isinstance(example, np.ndarray) else out)
