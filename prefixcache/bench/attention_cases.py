"""Attention calls to time: tensors of one shape, what is done with them, and how much work it is.

Everything is made once, on the device that is measured. K/V lie in a pool as the daemon's, blocks
in random order. Letters as in `prefixcache.types`; n is a sequence's length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from prefixcache.attention.batch import AttentionBatch, PrefixSharing, make_batch
from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization
from prefixcache.storage.pool_memory import PoolMemory
from prefixcache.storage.pool_views import DTYPES
from prefixcache.types import PLAIN_ATTENTION, AttentionOptions, BlockIds

CEILINGS, COPY, MATMUL, READ = "Ceilings", "copy", "matmul", "read all K/V"
_FILLED_BLOCKS = 4096  # of a quantised pool at a time


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape that all cases share."""

    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16

    def layout(self, dtype: str, quantization: Quantization | None = None) -> KVLayout:
        """Of one layer."""
        return KVLayout(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=dtype,
            quantization=quantization,
        )


@dataclass(frozen=True, slots=True)
class Latents:
    """The shape of latent K/V: DeepSeek-V3's by default."""

    num_heads: int = 128
    latent_dim: int = 512
    rope_dim: int = 64
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Operation:
    """One call. num_bytes: read and written, flops: of products; 0 where they are not the point.

    beside: the operation of the case that its time is compared with, if any.
    """

    name: str
    call: Callable[[], object]
    num_bytes: int = 0
    flops: int = 0
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Operations on the same tensors. needs_all_threads: with one they would only take longer."""

    name: str
    dtype: str
    operations: tuple[Operation, ...]
    needs_all_threads: bool = False


class Pool:
    """K/V of one layer in blocks, filled with random numbers. `num_blocks` in random order."""

    def __init__(self, layout: Layout, group: int, num_blocks: int, device: str) -> None:
        self.memory = PoolMemory(layout, num_blocks, device)
        self.cache = self.memory.layer(0)
        self.layout, self.group = layout, group
        self.dtype, self.device = self.memory.dtype, device
        self._fill(num_blocks)
        self._free = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)

    def _fill(self, num_blocks: int) -> None:
        if self.cache.scales is None:
            for view in (self.cache.keys, self.cache.values):
                view.normal_()
            return
        size = self.layout.block_size
        for first in range(0, num_blocks, _FILLED_BLOCKS):
            end = min(first + _FILLED_BLOCKS, num_blocks)
            new = self.new_tokens((end - first) * size)
            write_kv(self.cache, new, new, np.arange(first * size, end * size))

    def take(self, num_tokens: int) -> BlockIds:
        """Blocks for so many tokens, which are not taken again."""
        count = -(-num_tokens // self.layout.block_size)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return taken

    def queries(self, num_tokens: int) -> torch.Tensor:
        layout = self.layout
        shape = (num_tokens, layout.num_kv_heads * self.group, layout.head_dim)
        return torch.randn(shape, device=self.device).to(self.dtype)

    def new_tokens(self, num_tokens: int) -> torch.Tensor:
        """K or V of tokens: `[T, Hkv, D]`."""
        shape = (num_tokens, self.layout.num_kv_heads, self.layout.head_dim)
        return torch.randn(shape, device=self.device).to(self.dtype)

    def kv_bytes(self, num_tokens: int) -> int:
        """Of K and V of so many tokens."""
        layout = self.layout
        tensors = 1 if isinstance(layout, LatentLayout) else 2
        elements = tensors * layout.num_kv_heads * layout.head_dim
        return num_tokens * elements * DTYPES[layout.stored_dtype].itemsize

    def gather(self, tables: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as others take them: `[S, Hkv, n, D]`, contiguous. tables: `[S, blocks]`."""
        keys, values = (
            view[tables].transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]
            for view in (self.cache.keys, self.cache.values)
        )
        return keys, values


def decode_case(heads: Heads, dtype: str, num_sequences: int, context: int, device: str) -> Case:
    """One new token of each of some sequences."""
    call = DecodeCall(heads.layout(dtype), heads.group, num_sequences, context, device)
    pool, q = call.pool, call.q
    tables = torch.from_numpy(call.batch.block_tables.astype(np.int64)).to(device)

    def gather_sdpa() -> torch.Tensor:
        keys, values = pool.gather(tables, context)
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    peer = Operation("gather + SDPA", gather_sdpa, call.num_bytes, beside=READ)
    return Case(call.name, dtype, (*call.operations("decode"), peer))


def quantized_case(heads: Heads, dtype: str, num_sequences: int, context: int, device: str) -> Case:
    """The same over K/V of one byte and a scale for each token's head."""
    quantization = Quantization("float8_e4m3")
    layout = heads.layout(dtype, quantization)
    call = DecodeCall(layout, heads.group, num_sequences, context, device)
    return Case(
        call.name, f"{dtype}, K/V {quantization.dtype}", call.operations("decode, 1-byte K/V")
    )


def latent_case(
    latents: Latents, dtype: str, num_sequences: int, context: int, device: str
) -> Case:
    """One new token of each of some sequences, over the latents of all heads."""
    layout = LatentLayout(1, latents.latent_dim, latents.rope_dim, latents.block_size, dtype)
    call = DecodeCall(layout, latents.num_heads, num_sequences, context, device)
    # A product with R + P elements for the score, one with R for the output.
    a_token = 2 * (layout.head_dim + layout.value_dim) * latents.num_heads
    operations = call.operations("decode over latents", a_token * num_sequences * context)
    return Case(f"{call.name}, latents", dtype, operations, needs_all_threads=True)


class DecodeCall:
    """Tensors of a Decode of one token of each of some sequences of one length."""

    def __init__(
        self, layout: Layout, group: int, num_sequences: int, context: int, device: str
    ) -> None:
        size = layout.block_size
        self.pool = Pool(layout, group, num_sequences * -(-context // size), device)
        tables = [self.pool.take(context) for _ in range(num_sequences)]
        self.batch = _batch(tables, context - 1, 1, size)
        self.q = self.pool.queries(num_sequences)
        self.num_bytes = self.pool.kv_bytes(num_sequences * context)
        self.name = f"Decode of {num_sequences} x {context:,} tokens"
        self._options = AttentionOptions(scale=layout.head_dim**-0.5)

    def operations(self, name: str, flops: int = 0) -> tuple[Operation, ...]:
        words = self.pool.memory.spans.view(torch.int64)
        return (
            Operation(READ, words.sum, self.num_bytes),
            Operation(name, self._decode, self.num_bytes, flops, beside=READ),
        )

    def _decode(self) -> torch.Tensor:
        return decode(self.q, self.pool.cache, self.batch, self._options)


def prefill_case(heads: Heads, dtype: str, new: int, cached: int, device: str) -> Case:
    """New tokens of one sequence on top of cached ones."""
    pool = Pool(heads.layout(dtype), heads.group, -(-(new + cached) // heads.block_size), device)
    table = pool.take(new + cached)
    batch = _batch([table], cached, new, heads.block_size)
    q = pool.queries(new)
    keys, values = pool.gather(torch.from_numpy(table[None].astype(np.int64)), new + cached)
    keys, values = (each.repeat_interleave(heads.group, dim=1) for each in (keys, values))
    rows = q.transpose(0, 1)[None].contiguous()
    mask = causal_lower_right(new, new + cached)
    # Two products of D multiplications and additions for each pair of tokens that sees each other.
    pairs = new * cached + new * (new + 1) // 2
    flops = 4 * pairs * heads.num_kv_heads * heads.group * heads.head_dim
    return Case(
        f"Prefill of {new:,} tokens on {cached:,} cached ones",
        dtype,
        (
            Operation(
                "SDPA on contiguous tensors",
                lambda: F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask),
                flops=flops,
            ),
            Operation(
                "prefill",
                lambda: prefill(q, pool.cache, batch, PLAIN_ATTENTION),
                flops=flops,
                beside="SDPA on contiguous tensors",
            ),
        ),
        needs_all_threads=True,
    )


def shared_case(
    heads: Heads, dtype: str, num_sequences: int, shared: int, private: int, device: str
) -> Case:
    """One new token of each of some sequences with the same blocks at their start."""
    size = heads.block_size
    num_blocks = -(-shared // size) + num_sequences * -(-private // size)
    pool = Pool(heads.layout(dtype), heads.group, num_blocks, device)
    start = pool.take(shared)
    tables = [np.concatenate((start, pool.take(private))) for _ in range(num_sequences)]
    tree = _batch(tables, shared + private - 1, 1, size)
    flat = replace(tree, prefix_sharing=PrefixSharing.NEVER)
    q = pool.queries(num_sequences)
    return Case(
        f"Decode of {num_sequences} sequences, {shared:,} tokens shared and {private:,} private",
        dtype,
        (
            Operation(
                "flat",
                lambda: decode(q, pool.cache, flat, PLAIN_ATTENTION),
                pool.kv_bytes(num_sequences * (shared + private)),
            ),
            Operation(
                "tree",
                lambda: decode(q, pool.cache, tree, PLAIN_ATTENTION),
                pool.kv_bytes(shared + num_sequences * private),
                beside="flat",
            ),
            Operation("plan of a step", lambda: replace(tree).shared_prefix(size)),
        ),
    )


def move_case(heads: Heads, dtype: str, num_tokens: int, device: str) -> Case:
    """New K/V into the blocks of so many tokens, and as many blocks copied."""
    num_blocks = -(-num_tokens // heads.block_size)
    pool = Pool(heads.layout(dtype), heads.group, 2 * num_blocks, device)
    k, v = pool.new_tokens(num_tokens), pool.new_tokens(num_tokens)
    batch = _batch([pool.take(num_tokens)], 0, num_tokens, heads.block_size)
    sources, destinations = batch.block_tables[0].tolist(), pool.take(num_tokens).tolist()
    spans, num_bytes = pool.memory.spans, 2 * pool.kv_bytes(num_tokens)
    return Case(
        f"Moves of {num_tokens:,} tokens",
        dtype,
        (
            Operation(
                "write_kv", lambda: write_kv(pool.cache, k, v, batch.slot_mapping), num_bytes
            ),
            Operation(
                "copy_blocks", lambda: copy_blocks(spans, sources, spans, destinations), num_bytes
            ),
        ),
    )


def _batch(tables: list[BlockIds], start: int, num_tokens: int, block_size: int) -> AttentionBatch:
    """Each sequence computes so many tokens from `start` on."""
    count = len(tables)
    return make_batch(tables, [start] * count, [num_tokens] * count, [0] * count, block_size)


def ceiling_case(dtype: str, copy_bytes: int, matmul_size: int, device: str) -> Case:
    """What the machine does at best: a large copy, and a product of two square matrices."""
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    element = getattr(torch, dtype)
    left, right = (
        torch.randn(matmul_size, matmul_size, device=device).to(element) for _ in range(2)
    )
    return Case(
        CEILINGS,
        dtype,
        (
            Operation(COPY, lambda: target.copy_(source), 2 * copy_bytes),
            Operation(MATMUL, lambda: left @ right, flops=2 * matmul_size**3),
        ),
    )
