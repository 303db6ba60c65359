"""Tensors of the caller <-> bytes: numpy arrays and torch tensors, told apart without an import.

torch is never imported here: an argument can only be a torch tensor if somebody else has imported
it. Pure functions, no state.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import DTYPE_BYTES
from prefixcache.types import HostTensor

TensorT = TypeVar("TensorT")
"""A numpy array (float32, float16) or a torch tensor (bfloat16 too, on any device)."""


def to_host(tensor: object, field: str) -> HostTensor:
    """Row-major, little-endian bytes of a tensor: one copy, two from another device.

    Raises InvalidArgumentError, naming the field, for another kind of object or dtype. Nothing is
    cast: a rounding that the caller did not ask for would change the tokens generated.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        _check_dtype(dtype, field)
        dense = tensor.detach().cpu().contiguous()
        # numpy has no bfloat16; the bits are the same as those of an integer.
        host = dense.view(torch.int16).numpy() if dtype == "bfloat16" else dense.numpy()
    elif isinstance(tensor, np.ndarray):
        dtype = tensor.dtype.name
        _check_dtype(dtype, field)
        host = tensor
    else:
        kind = type(tensor).__name__
        raise InvalidArgumentError(field, f"must be a numpy array or a torch tensor, is a {kind}")
    little_endian = host.astype(host.dtype.newbyteorder("<"), copy=False)
    return HostTensor(dtype, tuple(host.shape), little_endian.tobytes())


def like(example: TensorT, tensor: HostTensor) -> TensorT:
    """The tensor as the kind of object that `example` is, on its device. Writable."""
    data = bytearray(tensor.data)
    if isinstance(example, np.ndarray):
        array: Any = np.frombuffer(data, dtype=np.dtype(tensor.dtype).newbyteorder("<"))
        result: TensorT = array.reshape(tensor.shape)
        return result
    torch: Any = sys.modules["torch"]
    flat = torch.frombuffer(data, dtype=getattr(torch, tensor.dtype))
    moved: TensorT = flat.reshape(tensor.shape).to(getattr(example, "device"))  # noqa: B009
    return moved


def _check_dtype(dtype: str, field: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise InvalidArgumentError(
            f"{field}.data_type", f"must be one of {', '.join(DTYPE_BYTES)}, is {dtype}"
        )
