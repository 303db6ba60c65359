"""A model without weights: q, k and v of a token follow from all tokens up to it, at random.

So two sequences have equal K/V exactly where they have equal prefixes, as in a real model, and a
block of another prefix shows in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from prefixcache.attention.batch import make_batch
from prefixcache.attention.reference.attention import attention
from prefixcache.attention.reference.write_kv import write_kv
from prefixcache.rpc._pb import attention_pb2
from prefixcache.server.daemon import Daemon
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.kv_cache import KVCache, KVScales
from prefixcache.storage.layout import Layout
from prefixcache.types import AttentionOptions
from tests.support.stubs import METHODS, Peer
from tests.support.tolerances import assert_close

_NUM_STATES = 4096
_DATA_TYPES = {
    torch.float32: attention_pb2.DATA_TYPE_FLOAT32,
    torch.float16: attention_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: attention_pb2.DATA_TYPE_BFLOAT16,
}
STORED_DTYPES = {"float8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_DTYPES = {value: dtype for dtype, value in _DATA_TYPES.items()}


class ToyModel:
    """Tensors are `[tokens, heads, D]` in the layout's dtype.

    options: of every call that says nothing else. scales: those of a layout with one a tensor.
    """

    def __init__(
        self,
        layout: Layout,
        num_query_heads: int,
        seed: int = 0,
        scales: FixedScales | None = None,
    ) -> None:
        self.layout = layout
        self.num_query_heads = num_query_heads
        self.scales = scales
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        # Latents have no default: their keys are longer than the model's.
        scale = layout.head_dim**-0.5 if layout.kind == "latent" else None
        self.options = AttentionOptions(scale=scale)
        generator = torch.Generator().manual_seed(seed)

        def table(num_heads: int, dim: int) -> torch.Tensor:
            shape = (layout.num_layers, _NUM_STATES, num_heads, dim)
            return torch.randn(shape, generator=generator).to(self.dtype)

        self._q = table(num_query_heads, layout.head_dim)
        self._k = table(layout.num_kv_heads, layout.head_dim)
        self._v = table(layout.num_kv_heads, layout.value_dim)

    def q(self, layer: int, tokens: Sequence[int], start: int = 0) -> torch.Tensor:
        return self._q[layer, _states(tokens)[start:]]

    def k(self, layer: int, tokens: Sequence[int], start: int = 0) -> torch.Tensor:
        return self._k[layer, _states(tokens)[start:]]

    def v(self, layer: int, tokens: Sequence[int], start: int = 0) -> torch.Tensor | None:
        """None for latent K/V."""
        if self.layout.kind == "latent":
            return None
        return self._v[layer, _states(tokens)[start:]]

    def exact(
        self,
        layer: int,
        tokens: Sequence[int],
        start: int = 0,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        """Attention output of the tokens from `start` on, `[.., Hq, Dv] float64`."""
        n = len(tokens)
        batch = make_batch([np.array([0], np.int32)], [start], [n - start], [0], n)
        cache = self._cache(layer, tokens)
        return attention(self.q(layer, tokens, start), cache, batch, options or self.options)

    def _cache(self, layer: int, tokens: Sequence[int]) -> KVCache:
        """K/V of all tokens in one block, as they are stored."""
        layout, n = self.layout, len(tokens)
        dtype = STORED_DTYPES.get(layout.stored_dtype, self.dtype)
        keys = torch.zeros((1, layout.num_kv_heads, n, layout.head_dim), dtype=dtype)
        values = torch.zeros_like(keys)
        if layout.kind == "latent":
            cache = KVCache(keys, keys[..., : layout.value_dim], is_latent=True)
        elif layout.quantization is None:
            cache = KVCache(keys, values)
        elif self.scales is None:
            scales = torch.zeros(2, *keys.shape[:3])
            cache = KVCache(keys, values, KVScales(scales[0], scales[1]))
        else:
            scales = torch.zeros(2, 1, 1, 1).expand(2, *keys.shape[:3])
            fixed = (self.scales.keys[layer], self.scales.values[layer])
            cache = KVCache(keys, values, KVScales(scales[0], scales[1], fixed))
        write_kv(cache, self.k(layer, tokens), self.v(layer, tokens), np.arange(n))
        return cache


def _states(tokens: Sequence[int]) -> list[int]:
    state, states = 17, []
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**31 - 1)
        states.append(state % _NUM_STATES)
    return states


@dataclass
class Run:
    """One sequence through the toy model: its tokens and where each layer stands."""

    peer: Peer
    model: ToyModel
    tokens: list[int]
    sequence_id: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    positions: list[int] = field(default_factory=list)

    def allocate(self, **fields: int) -> Run:
        reply = self.peer.allocate(self.tokens, **fields)
        self.sequence_id = reply.sequence_id
        self.block_ids = list(reply.block_ids)
        self.num_cached_tokens = reply.num_cached_tokens
        self.positions = [reply.num_cached_tokens] * self.model.layout.num_layers
        return self

    def forked(self, sequence_id: int) -> Run:
        positions = list(self.positions)
        return Run(
            self.peer,
            self.model,
            list(self.tokens),
            sequence_id,
            list(self.block_ids),
            len(self.tokens),
            positions,
        )

    def append(self, tokens: Sequence[int], **counts: int) -> tuple[tuple[int, int], ...]:
        """Append in an RPC of its own; returns the copies."""
        start = len(self.tokens)
        row = self.peer.append(self.sequence_id, start, tokens, **counts)
        assert row.code == 1, row
        for source, destination in row.copies:
            self.block_ids[self.block_ids.index(source)] = destination
        self.block_ids += row.new_block_ids
        self.tokens += tokens
        accepted = start + counts.get("num_kv_valid", 0)
        self.positions = [min(position, accepted) for position in self.positions]
        return row.copies

    def truncate(self, num_tokens: int) -> None:
        dropped = self.peer.truncate(self.sequence_id, len(self.tokens), num_tokens)
        assert dropped == self.block_ids[len(self.block_ids) - len(dropped) :]
        del self.block_ids[len(self.block_ids) - len(dropped) :]
        del self.tokens[num_tokens:]
        self.positions = [min(position, num_tokens) for position in self.positions]

    def compute(self, count: int | None = None, name: str = "Prefill") -> None:
        """The next tokens (all that are left) through all layers, checked against float64."""
        for layer in range(self.model.layout.num_layers):
            self.compute_layer(layer, count, name)

    def compute_layer(
        self, layer: int, count: int | None = None, name: str = "Prefill"
    ) -> torch.Tensor:
        left = len(self.tokens) - self.positions[layer]
        return compute_batch(layer, [(self, left if count is None else count)], name)[0]

    def free(self) -> None:
        assert self.peer.free(self.sequence_id) == [1]


def compute_batch(
    layer: int,
    rows: Sequence[tuple[Run, int]],
    name: str,
    options: AttentionOptions | None = None,
) -> list[torch.Tensor]:
    """One call for the next tokens of many sequences, each checked against float64."""
    request = attention_request(name, layer, rows, options)
    reply = rows[0][0].peer.stubs.call(name, request)
    parts = split_output(reply, rows)
    for (run, count), part in zip(rows, parts, strict=True):
        start = run.positions[layer]
        run.positions[layer] = start + count
        assert_close(part, run.model.exact(layer, run.tokens[: start + count], start, options))
    return parts


def attention_request(
    name: str,
    layer: int,
    rows: Sequence[tuple[Run, int]],
    options: AttentionOptions | None = None,
) -> attention_pb2.PrefillRequest:
    """The next `count` tokens of each sequence at a layer."""
    model = rows[0][0].model
    pieces = [
        (run.tokens[: run.positions[layer] + count], run.positions[layer]) for run, count in rows
    ]
    columns = [(run.sequence_id, run.positions[layer], count) for run, count in rows]
    request = METHODS[name].request(
        batch=rows[0][0].peer.batch(layer, columns, options or model.options)
    )
    for operand in ("q", "k", "v"):
        parts = [getattr(model, operand)(layer, tokens, start) for tokens, start in pieces]
        if parts[0] is not None:
            getattr(request, operand).CopyFrom(to_wire(torch.cat(parts)))
    return request


def split_output(reply: object, rows: Sequence[tuple[Run, int]]) -> list[torch.Tensor]:
    return list(from_wire(reply.out).split([count for _, count in rows]))


def to_wire(tensor: torch.Tensor) -> attention_pb2.Tensor:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return attention_pb2.Tensor(data_type=_DATA_TYPES[tensor.dtype], shape=tensor.shape, data=data)


def from_wire(message: attention_pb2.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(message.data), dtype=_DTYPES[message.data_type])
    return flat.reshape(tuple(message.shape))


def poison(daemon: Daemon, value: float = float("nan")) -> None:
    """Fill every slot that holds no K/V of anybody, in every layer. No call may be running."""
    sequences, memory = daemon.sequences, daemon.engine.memory
    size, pool = memory.layout.block_size, sequences.pool
    for layer in range(memory.layout.num_layers):
        unused = torch.ones(pool.num_blocks, size, dtype=torch.bool)
        for block in range(pool.num_blocks):
            if pool.hash_of(block) is not None:
                unused[block] = False
        for sequence in sequences.live.all_holders():
            unused[sequence.copy_holds] = False
            for position in range(sequence.computed[layer]):
                unused[sequence.block_table[position // size], position % size] = False
        poison_slots(memory.layer(layer), unused, value)


def poison_slots(cache: KVCache, slots: torch.Tensor, value: float = float("nan")) -> None:
    """slots: `[N, B] bool`. Quantised numbers become NaN or 127, and `value` their scales.

    A scale of a whole block is poison only if all of its slots are.
    """
    if cache.scales is None:
        for view in (cache.keys, cache.values):
            view.transpose(1, 2)[slots] = value
        return
    for view in (cache.keys, cache.values):
        view.view(torch.uint8).transpose(1, 2)[slots] = 0x7F
    for scales in (cache.scales.keys, cache.scales.values):
        if cache.scales.fixed is None:
            scales.transpose(1, 2)[slots] = value
        else:
            scales[:, 0, 0][slots.all(1)] = value


def bytes_of(daemon: Daemon, block_ids: Sequence[int] | None = None) -> list[bytes]:
    """The K/V of each block (of the whole pool), all layers."""
    memory = daemon.engine.memory
    ids = range(memory.num_blocks) if block_ids is None else block_ids
    return [memory.block_span(block_id).numpy().tobytes() for block_id in ids]
