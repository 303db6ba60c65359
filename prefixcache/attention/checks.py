"""What the launchers require of their input, checked before anything is read or written.

The border behind which the attention code trusts shapes and indices. Every failure is an
InvalidArgumentError that names the argument. Pure.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.core.form import is_compiled
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

_agrees = None
if is_compiled("prefixcache.attention.native.batch"):
    from prefixcache.attention.native.batch import agrees

    _agrees = agrees

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of q, k and v, and of a cache that is not quantised."""
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Of a cache with scales."""


def check_write(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor | None, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """The arguments of `write_kv`."""
    _check_cache(cache)
    num_blocks, num_kv_heads, block_size, head_dim = cache.keys.shape
    num_tokens = len(slot_mapping)
    _check_input("k", k, (num_tokens, num_kv_heads, head_dim), cache)
    if (v is None) != cache.is_latent:
        raise InvalidArgumentError("v", "is a part of k in a latent cache, and needed in others")
    if v is not None:
        _check_input("v", v, (num_tokens, num_kv_heads, cache.values.shape[3]), cache)
        if v.dtype != k.dtype:
            raise InvalidArgumentError("v", f"is {v.dtype}, k is {k.dtype}")
    _check_int_array("slot_mapping", slot_mapping, (len(slot_mapping),), np.int64)
    if len(slot_mapping) == 0:
        return
    lowest, highest = int(slot_mapping.min()), int(slot_mapping.max())
    if lowest < -1 or highest >= num_blocks * block_size:
        raise InvalidArgumentError(
            "slot_mapping",
            f"slots {lowest}..{highest}, and the cache has 0..{num_blocks * block_size - 1}",
        )


def output_of(q: torch.Tensor, cache: KVCache, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, or new memory: `[T, Hq, Dv]`, contiguous, like q."""
    shape = (*q.shape[:2], cache.values.shape[3])
    if out is None:
        return q.new_empty(shape)
    if (out.shape, out.dtype, out.device) != (shape, q.dtype, q.device) or not out.is_contiguous():
        raise InvalidArgumentError(
            "out",
            f"must be contiguous {q.dtype} {list(shape)} on {q.device}, is {out.dtype} "
            f"{list(out.shape)} on {out.device}",
        )
    return out


def check_attention(
    q: torch.Tensor, cache: KVCache, batch: AttentionBatch, options: AttentionOptions
) -> None:
    """The arguments of `prefill` and `decode`."""
    _check_cache(cache)
    num_blocks, num_kv_heads, block_size, head_dim = cache.keys.shape
    if q.ndim != 3 or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise InvalidArgumentError(
            "q",
            f"must be [T, Hq, D] with Hq a multiple of {num_kv_heads} KV heads, is {list(q.shape)}",
        )
    _check_input("q", q, (q.shape[0], q.shape[1], head_dim), cache)
    check_options(options, q.shape[1], is_latent=cache.is_latent)
    num_tokens = q.shape[0]
    # A batch serves all layers of a step, whose pools have the same size.
    batch.derive(
        ("checked", num_tokens, num_blocks, block_size),
        lambda: check_batch(batch, num_tokens, num_blocks, block_size),
    )


def check_options(options: AttentionOptions, num_query_heads: int, *, is_latent: bool) -> None:
    """The options fit each other and q."""
    if options.scale is None and is_latent:
        raise InvalidArgumentError("scale", "has no default for latent K/V")
    if options.scale is not None and not math.isfinite(options.scale):
        raise InvalidArgumentError("scale", f"must be finite, is {options.scale}")
    if options.window is not None and options.window < 1:
        raise InvalidArgumentError("window", f"must be >= 1, is {options.window}")
    if options.soft_cap is not None and not 0 < options.soft_cap < math.inf:
        raise InvalidArgumentError("soft_cap", f"must be finite and > 0, is {options.soft_cap}")
    for name in ("alibi_slopes", "sinks"):
        numbers = getattr(options, name)
        if numbers and len(numbers) != num_query_heads:
            raise InvalidArgumentError(
                name, f"has {len(numbers)} numbers, there are {num_query_heads} query heads"
            )
        if not all(map(math.isfinite, numbers)):
            raise InvalidArgumentError(name, "must be finite")


def check_batch(batch: AttentionBatch, num_tokens: int, num_blocks: int, block_size: int) -> None:
    """The arrays agree with each other and with the pool. Unused table entries may be anything."""
    if _agrees is None or not _agrees(batch, num_tokens, num_blocks, block_size):
        check_batch_in_numpy(batch, num_tokens, num_blocks, block_size)


def check_batch_in_numpy(
    batch: AttentionBatch, num_tokens: int, num_blocks: int, block_size: int
) -> None:
    """`check_batch` without compiled code, which does not say what is wrong."""
    num_sequences = len(batch.seq_lens)
    tables = batch.block_tables
    if tables.ndim != 2:
        raise InvalidArgumentError("block_tables", f"must be [S, blocks], is {tables.shape}")
    _check_int_array("block_tables", tables, (num_sequences, tables.shape[1]), np.int32)
    _check_int_array("query_start", batch.query_start, (num_sequences + 1,), np.int32)
    _check_int_array("context_lens", batch.context_lens, (num_sequences,), np.int32)
    _check_int_array("seq_lens", batch.seq_lens, (num_sequences,), np.int32)
    # int64, so that no sum below can wrap round.
    query_start = batch.query_start.astype(np.int64)
    seq_lens = batch.seq_lens.astype(np.int64)
    query_lens = np.diff(query_start)
    if query_start[0] != 0 or query_start[-1] != num_tokens or (query_lens < 0).any():
        raise InvalidArgumentError(
            "query_start", f"must rise from 0 to {num_tokens}, is {query_start.tolist()}"
        )
    if (batch.context_lens < 0).any():
        raise InvalidArgumentError("context_lens", f"must be >= 0, is {batch.context_lens.min()}")
    if (seq_lens != batch.context_lens + query_lens).any():
        raise InvalidArgumentError("seq_lens", "must be context_lens plus the query lengths")
    num_used = -(-seq_lens // block_size)
    if (num_used > tables.shape[1]).any():
        raise InvalidArgumentError(
            "block_tables",
            f"{tables.shape[1]} entries a sequence, {num_used.max()} are needed",
        )
    used = np.arange(tables.shape[1]) < num_used[:, None]
    wrong = used & ((tables < 0) | (tables >= num_blocks))
    if wrong.any():
        raise InvalidArgumentError(
            "block_tables", f"block {tables[wrong][0]}, and the cache has {num_blocks}"
        )


def _check_cache(cache: KVCache) -> None:
    keys, values = cache.keys, cache.values
    if keys.ndim != 4 or 0 in keys.shape[1:]:
        raise InvalidArgumentError("keys", f"must be [N, Hkv, B, D], is {list(keys.shape)}")
    if keys.dtype not in (DTYPES if cache.scales is None else QUANTIZED_DTYPES):
        kind = "" if cache.scales is None else " with scales"
        raise InvalidArgumentError("keys", f"has the dtype {keys.dtype}, unfit for a cache{kind}")
    value_dim = keys.shape[3]
    if cache.is_latent:
        if keys.shape[1] != 1 or cache.scales is not None:
            raise InvalidArgumentError("keys", "latent K/V have one head and no scales")
        value_dim = values.shape[-1]
        if not 1 <= value_dim <= keys.shape[3] or values.data_ptr() != keys.data_ptr():
            raise InvalidArgumentError("values", "must be the first elements of latent K")
    _check_tensor("values", values, (*keys.shape[:3], value_dim), keys)
    if values.dtype != keys.dtype:
        raise InvalidArgumentError("values", f"is {values.dtype}, the keys are {keys.dtype}")
    if cache.scales is not None:
        for name in ("keys", "values"):
            scales = getattr(cache.scales, name)
            _check_tensor(f"scales.{name}", scales, tuple(keys.shape[:3]), keys)
            if scales.dtype != torch.float32:
                raise InvalidArgumentError(f"scales.{name}", f"must be float32, is {scales.dtype}")
            # A dimension of one element may have any stride.
            steps = zip(scales.shape[1:], scales.stride()[1:], strict=True)
            if cache.scales.fixed is not None and any(size > 1 and step for size, step in steps):
                raise InvalidArgumentError(
                    f"scales.{name}", "must have the strides 0 over heads and tokens where fixed"
                )


def _check_input(field: str, tensor: torch.Tensor, shape: tuple[int, ...], cache: KVCache) -> None:
    """q, k or v: of the cache's dtype, and of any if that is quantised."""
    _check_tensor(field, tensor, shape, cache.keys)
    if tensor.dtype not in (DTYPES if cache.scales is not None else (cache.keys.dtype,)):
        raise InvalidArgumentError(field, f"is {tensor.dtype}, the cache is {cache.keys.dtype}")


def _check_tensor(
    field: str, tensor: torch.Tensor, shape: tuple[int, ...], keys: torch.Tensor
) -> None:
    if tensor.shape != shape:
        raise InvalidArgumentError(field, f"must be {list(shape)}, is {list(tensor.shape)}")
    if tensor.device != keys.device:
        raise InvalidArgumentError(field, f"is on {tensor.device}, the cache is on {keys.device}")


def _check_int_array(
    field: str,
    array: npt.NDArray[np.signedinteger],
    shape: tuple[int, ...],
    dtype: type[np.signedinteger],
) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise InvalidArgumentError(
            field,
            f"must be {list(shape)} {dtype.__name__}, is {list(array.shape)} {array.dtype}",
        )
