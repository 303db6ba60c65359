"""Prefill and Decode of sequences: tensors and positions -> request, reply -> tensor. No I/O.

A call that fails leaves the positions as they were, so it may come again: the daemon computes the
output of a repeat again and writes nothing. Not thread-safe, as `SequenceState`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import numpy.typing as npt

from prefixcache.client.arena import Region, aligned
from prefixcache.client.columns import uint32, uint32_column
from prefixcache.client.messages import Call
from prefixcache.client.sequence_calls import States, check_length, sequence_ids
from prefixcache.client.tensors import HostView, TensorT, host_view, like
from prefixcache.rpc.codec import (
    set_options,
    set_tensor_type,
    tensor_from_wire,
    tensor_type_from_wire,
)
from prefixcache.rpc.wire import column32, twin
from prefixcache.storage.layout import Layout
from prefixcache.types import AttentionOptions, HostTensor

Tensors: TypeAlias = tuple[TensorT, TensorT, TensorT | None]
"""q, k and v; no v for latent K/V."""


@dataclass(frozen=True, slots=True)
class AttentionCall(Generic[TensorT]):
    """A Prefill or Decode whose tensors are not in its request yet.

    inputs: by the request's field. advance: the sequences, once the call has succeeded.
    """

    method: str
    request: Any
    q: TensorT
    inputs: tuple[tuple[str, HostView], ...]
    advance: Callable[[], None]

    def out_bytes(self, layout: Layout | None) -> int:
        """Of the output, on a daemon with that layout; 0 for what it will refuse."""
        q = self.inputs[0][1]
        if layout is None or len(q.shape) != 3:
            return 0
        return q.shape[0] * q.shape[1] * layout.value_dim * q.array.itemsize

    def num_bytes(self, layout: Layout | None) -> int:
        """What a region needs for all tensors; 0 if they cannot go by reference."""
        out_bytes = self.out_bytes(layout)
        if out_bytes == 0:
            return 0
        return aligned(out_bytes) + sum(aligned(view.num_bytes) for _, view in self.inputs)

    def inline(self) -> Call[TensorT]:
        """Tensors go in the messages."""
        for field, view in self.inputs:
            message = getattr(self.request, field)
            message.Clear()
            set_tensor_type(message, view.dtype, view.shape)
            message.data = view.to_bytes()
        self.request.ClearField("out")

        def read(reply: Any) -> TensorT:
            out = like(self.q, tensor_from_wire(reply.out, "out"))
            self.advance()
            return out

        return Call(self.method, self.request, read)

    def by_reference(self, region: Region, layout: Layout | None) -> Call[TensorT]:
        """Tensors go through the region, which is `num_bytes` long."""
        for field, view in self.inputs:
            message = getattr(self.request, field)
            message.Clear()
            set_tensor_type(message, view.dtype, view.shape)
            view.copy_to(_placed(message.arena, region, view.num_bytes))
        memory = _placed(self.request.out, region, self.out_bytes(layout))

        def read(reply: Any) -> TensorT:
            dtype, shape, _ = tensor_type_from_wire(reply.out, "out")
            out = like(self.q, HostTensor(dtype, shape, memory.data))
            self.advance()
            return out

        return Call(self.method, self.request, read)


def _placed(span: Any, region: Region, num_bytes: int) -> npt.NDArray[Any]:
    """Fill an ArenaSpan with the next place of the region; returns that memory."""
    offset, memory = region.take(num_bytes)
    span.arena_id, span.offset, span.num_bytes = region.arena_id, offset, num_bytes
    return memory


def prefill(
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
) -> AttentionCall[TensorT]:
    """num_tokens: new tokens of each sequence; None for all of T, of the only one."""
    return _attention("Prefill", owner, layer, states, num_tokens, tensors, options)


def decode(
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
) -> AttentionCall[TensorT]:
    """num_tokens: as for `prefill`."""
    return _attention("Decode", owner, layer, states, num_tokens, tensors, options)


def _attention(
    method: str,
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
) -> AttentionCall[TensorT]:
    layer = uint32(layer, "layer")
    starts = [state.position(layer) for state in states]
    q, k, v = tensors
    inputs = [("q", host_view(q, "q"))]
    if num_tokens is None:
        num_tokens = list(inputs[0][1].shape[:1])
    counts = uint32_column(num_tokens, "num_tokens").tolist()
    check_length(counts, "num_tokens", states)
    request = twin(f"{method}Request")()
    request.batch.owner = owner
    request.batch.layer = layer
    request.batch.sequence_ids = sequence_ids(states)
    request.batch.start_positions = column32(starts)
    request.batch.num_tokens = column32(counts)
    set_options(request.batch, options)
    inputs.append(("k", host_view(k, "k")))
    if v is not None:
        inputs.append(("v", host_view(v, "v")))

    def advance() -> None:
        for state, start, count in zip(states, starts, counts, strict=True):
            state.advanced(layer, start + count)

    return AttentionCall(method, request, q, tuple(inputs), advance)
