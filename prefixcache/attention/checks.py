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
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_write(
    cache: KVCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """The arguments of `write_kv`."""
    _check_cache(cache)
    num_blocks, num_kv_heads, block_size, head_dim = cache.keys.shape
    expected = (len(slot_mapping), num_kv_heads, head_dim)
    _check_like_cache("k", k, expected, cache.keys)
    _check_like_cache("v", v, expected, cache.keys)
    _check_int_array("slot_mapping", slot_mapping, (len(slot_mapping),), np.int64)
    if len(slot_mapping) == 0:
        return
    lowest, highest = int(slot_mapping.min()), int(slot_mapping.max())
    if lowest < -1 or highest >= num_blocks * block_size:
        raise InvalidArgumentError(
            "slot_mapping",
            f"slots {lowest}..{highest}, and the cache has 0..{num_blocks * block_size - 1}",
        )


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
    _check_like_cache("q", q, (q.shape[0], q.shape[1], head_dim), cache.keys)
    if options.scale is not None and not math.isfinite(options.scale):
        raise InvalidArgumentError("scale", f"must be finite, is {options.scale}")
    check_batch(batch, q.shape[0], num_blocks, block_size)


def check_batch(batch: AttentionBatch, num_tokens: int, num_blocks: int, block_size: int) -> None:
    """The arrays agree with each other and with the pool. Unused table entries may be anything."""
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
    key_cache, value_cache = cache.keys, cache.values
    if key_cache.ndim != 4 or 0 in key_cache.shape[1:]:
        raise InvalidArgumentError("keys", f"must be [N, Hkv, B, D], is {list(key_cache.shape)}")
    if key_cache.dtype not in DTYPES:
        raise InvalidArgumentError("keys", f"has the unsupported dtype {key_cache.dtype}")
    _check_like_cache("values", value_cache, tuple(key_cache.shape), key_cache)


def _check_like_cache(
    field: str, tensor: torch.Tensor, shape: tuple[int, ...], key_cache: torch.Tensor
) -> None:
    if tensor.shape != shape:
        raise InvalidArgumentError(field, f"must be {list(shape)}, is {list(tensor.shape)}")
    if tensor.dtype != key_cache.dtype:
        raise InvalidArgumentError(field, f"is {tensor.dtype}, the cache is {key_cache.dtype}")
    if tensor.device != key_cache.device:
        raise InvalidArgumentError(
            field, f"is on {tensor.device}, the cache is on {key_cache.device}"
        )


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
