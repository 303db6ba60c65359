"""Tensors of the caller as torch has them, without a copy where they are dense. No state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from prefixcache.client.tensors import TensorT
from prefixcache.engine import check_new_tokens
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import Layout
from prefixcache.storage.pool_views import DTYPES

NewTokens: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """dtype: "float32", "float16", "bfloat16" or what else torch calls it."""

    dtype: str
    shape: tuple[int, ...]


def new_tokens(
    q: object, k: object, v: object | None, layout: Layout, num_tokens: int
) -> NewTokens:
    """q, k and v of so many tokens, as the layout wants them. Raises InvalidArgumentError."""
    tensors = _as_torch(q, "q"), _as_torch(k, "k"), None if v is None else _as_torch(v, "v")
    if not _fit(tensors, layout, num_tokens):
        queries, keys, values = tensors
        kinds = _kind(queries), _kind(keys), None if values is None else _kind(values)
        check_new_tokens(layout, kinds, num_tokens)
    return tensors


def shaped_like(example: TensorT, out: torch.Tensor) -> TensorT:
    """The tensor as the kind of object that `example` is."""
    return cast(TensorT, out.numpy() if isinstance(example, np.ndarray) else out)


def _as_torch(tensor: object, field: str) -> torch.Tensor:
    """Dense, and for reading only."""
    if isinstance(tensor, torch.Tensor):
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        return dense.detach() if dense.requires_grad else dense
    if not isinstance(tensor, np.ndarray) or tensor.dtype.kind not in "biuf":
        kind = f"array of {tensor.dtype}" if isinstance(tensor, np.ndarray) else type(tensor)
        raise InvalidArgumentError(field, f"must be a numpy array or a torch tensor, is {kind}")
    native: np.ndarray[Any, Any] = tensor.astype(tensor.dtype.newbyteorder("="), copy=False)
    # Torch wants memory that may be written to.
    return torch.from_numpy(np.require(native, requirements=("C", "W")))


def _fit(tensors: NewTokens, layout: Layout, num_tokens: int) -> bool:
    """Quicker to say than `check_new_tokens`, which finds the words for a no."""
    q, k, v = tensors
    dtype, heads = DTYPES[layout.dtype], layout.num_kv_heads
    num_heads = q.shape[1] if q.ndim == 3 else 0
    return (
        q.dtype is k.dtype is dtype
        and num_heads % heads == 0 < num_heads
        and q.shape == (num_tokens, num_heads, layout.head_dim)
        and k.shape == (num_tokens, heads, layout.head_dim)
        and (layout.kind == "latent") == (v is None)
        and (v is None or (v.dtype is dtype and v.shape == (num_tokens, heads, layout.value_dim)))
    )


def _kind(tensor: torch.Tensor) -> _Kind:
    return _Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
