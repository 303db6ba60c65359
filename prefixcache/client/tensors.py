"""Tensors of the caller <-> bytes: numpy arrays and torch tensors, told apart without an import.

torch is never imported here: an argument can only be a torch tensor if somebody else has imported
it. Pure functions, no state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import DTYPE_BYTES
from prefixcache.types import HostTensor

TensorT = TypeVar("TensorT")
"""A numpy array (float32, float16) or a torch tensor (bfloat16 too, on any device)."""


@dataclass(frozen=True, slots=True)
class HostView:
    """A tensor of the caller's in host memory, and no copy if it is there already.

    array: little-endian, any strides; of integers for bfloat16, which numpy has not.
    """

    dtype: str
    array: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes

    def to_bytes(self) -> bytes:
        """Row-major: one copy."""
        return self.array.tobytes()

    def copy_to(self, memory: npt.NDArray[np.uint8]) -> None:
        """The same into memory of `num_bytes`, without the GIL."""
        np.copyto(memory.view(self.array.dtype).reshape(self.shape), self.array)

    def copy_from(self, tensor: HostTensor) -> None:
        """Fill it with one of its shape and dtype, without the GIL."""
        data = np.frombuffer(tensor.data, self.array.dtype)
        np.copyto(self.array, data.reshape(self.shape))


def host_view(tensor: object, field: str) -> HostView:
    """Raises InvalidArgumentError, naming the field, for another kind of object or dtype.

    Nothing is cast: a rounding that the caller did not ask for would change the tokens generated.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        _check_dtype(dtype, field)
        host = tensor.detach().cpu()
        array = host.view(torch.int16).numpy() if dtype == "bfloat16" else host.numpy()
    elif isinstance(tensor, np.ndarray):
        dtype = tensor.dtype.name
        _check_dtype(dtype, field)
        array = tensor
    else:
        kind = type(tensor).__name__
        raise InvalidArgumentError(field, f"must be a numpy array or a torch tensor, is a {kind}")
    return HostView(dtype, array.astype(array.dtype.newbyteorder("<"), copy=False))


def writable_view(tensor: object, field: str) -> HostView:
    """Raises InvalidArgumentError as `host_view`, and where a write would not reach the tensor."""
    if not _is_in_host_memory(tensor):
        raise InvalidArgumentError(field, "must be in host memory, and of the host's byte order")
    view = host_view(tensor, field)
    if not view.array.flags.writeable:
        raise InvalidArgumentError(field, "cannot be written to")
    return view


def empty(
    shape: Sequence[int], dtype: object, memory: Callable[[int], npt.NDArray[np.uint8]]
) -> Any:
    """A tensor without content, in memory of so many bytes.

    dtype: of torch, for a torch tensor, or of numpy. Raises InvalidArgumentError.
    """
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = str(dtype).removeprefix("torch.") if is_torch else _numpy_name(dtype)
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError("dtype", f"is {name}, must be one of {', '.join(DTYPE_BYTES)}")
    if any(length < 0 for length in shape):
        raise InvalidArgumentError("shape", f"is {list(shape)}")
    num_bytes = math.prod(shape) * DTYPE_BYTES[name]
    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype) if is_torch else np.empty(shape, name)
    data = memory(num_bytes)
    return (
        torch.from_numpy(data).view(dtype).reshape(*shape)
        if is_torch
        else data.view(name).reshape(shape)
    )


def like(example: TensorT, tensor: HostTensor) -> TensorT:
    """The tensor as the kind of object that `example` is, on its device. Writable, own memory."""
    # numpy copies without the GIL.
    data = np.frombuffer(tensor.data, np.uint8).copy()
    if isinstance(example, np.ndarray):
        array: Any = data.view(np.dtype(tensor.dtype).newbyteorder("<"))
        result: TensorT = array.reshape(tensor.shape)
        return result
    torch: Any = sys.modules["torch"]
    flat = torch.from_numpy(data).view(getattr(torch, tensor.dtype))
    moved: TensorT = flat.reshape(tensor.shape).to(getattr(example, "device"))  # noqa: B009
    return moved


def _numpy_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype).name)
    except TypeError as error:
        raise InvalidArgumentError("dtype", str(error)) from None


def _is_in_host_memory(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        return bool(tensor.dtype.isnative)
    device = getattr(tensor, "device", None)
    return device is None or bool(device.type == "cpu")


def _check_dtype(dtype: str, field: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise InvalidArgumentError(
            f"{field}.data_type", f"must be one of {', '.join(DTYPE_BYTES)}, is {dtype}"
        )
