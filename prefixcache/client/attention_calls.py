"""Prefill and Decode of sequences: tensors and positions -> request, reply -> tensor. No I/O.

A call that fails leaves the positions as they were, so it may come again: the daemon computes the
output of a repeat again and writes nothing. Not thread-safe, as `SequenceState`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

import numpy.typing as npt

from prefixcache.client.arena import Arena, Region, aligned
from prefixcache.client.columns import uint32, uint32_column
from prefixcache.client.messages import Call
from prefixcache.client.sequence_calls import States, check_length, sequence_ids
from prefixcache.client.tensors import HostView, TensorT, host_view, like, writable_view
from prefixcache.errors import InvalidArgumentError
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

    inputs: by the request's field. out: the caller's place for the output, and a view of it; None
    if it has none. advance: the sequences, once the call has succeeded.
    """

    method: str
    request: Any
    q: TensorT
    inputs: tuple[tuple[str, HostView], ...]
    out: tuple[TensorT, HostView] | None
    advance: Callable[[], None]

    def check_out(self, layout: Layout | None) -> None:
        """Raises InvalidArgumentError if the output of a daemon with that layout does not fit."""
        q = self.inputs[0][1]
        if self.out is None or layout is None or len(q.shape) != 3:
            return
        view, shape = self.out[1], (*q.shape[:2], layout.value_dim)
        if view.dtype != q.dtype:
            raise InvalidArgumentError("out.data_type", f"is {view.dtype}, q is {q.dtype}")
        if view.shape != shape:
            raise InvalidArgumentError("out.shape", f"is {list(view.shape)}, must be {list(shape)}")

    def num_bytes(self, layout: Layout | None) -> int:
        """Of all tensors; 0 if they cannot go by reference."""
        out_bytes = self._out_bytes(layout)
        if out_bytes == 0:
            return 0
        return out_bytes + sum(view.num_bytes for _, view in self.inputs)

    def region(self, layout: Layout | None, arena: Arena) -> Region | None:
        """For the tensors that do not lie in the arena already; None if there is no room."""
        offsets = [arena.offset_of(view.array) for _, view in self.inputs]
        offsets.append(None if self.out is None else arena.offset_of(self.out[1].array))
        sizes = [view.num_bytes for _, view in self.inputs]
        sizes.append(self._out_bytes(layout))
        missing = zip(offsets, sizes, strict=True)
        num_bytes = sum(aligned(size) for offset, size in missing if offset is None)
        return arena.region(num_bytes, offsets)

    def inline(self) -> Call[TensorT]:
        """Tensors go in the messages."""
        for field, view in self.inputs:
            message = getattr(self.request, field)
            message.Clear()
            set_tensor_type(message, view.dtype, view.shape)
            message.data = view.to_bytes()
        self.request.ClearField("out")

        def read(reply: Any) -> TensorT:
            out = self._taken(tensor_from_wire(reply.out, "out"))
            self.advance()
            return out

        return Call(self.method, self.request, read)

    def by_reference(self, region: Region, layout: Layout | None) -> Call[TensorT]:
        """Tensors go through `region`."""
        *offsets, out_offset = region.offsets
        for (field, view), offset in zip(self.inputs, offsets, strict=True):
            message = getattr(self.request, field)
            message.Clear()
            set_tensor_type(message, view.dtype, view.shape)
            if offset is None:
                offset, memory = region.take(view.num_bytes)
                view.copy_to(memory)
            _set_span(message.arena, region, offset, view.num_bytes)
        result: npt.NDArray[Any] | None = None
        num_bytes = self._out_bytes(layout)
        if out_offset is None:
            out_offset, result = region.take(num_bytes)
        _set_span(self.request.out, region, out_offset, num_bytes)

        def read(reply: Any) -> TensorT:
            if result is not None:
                dtype, shape, _ = tensor_type_from_wire(reply.out, "out")
                out = self._taken(HostTensor(dtype, shape, result.data))
            else:
                assert self.out is not None
                out = self.out[0]
            self.advance()
            return out

        return Call(self.method, self.request, read)

    def _out_bytes(self, layout: Layout | None) -> int:
        """On a daemon with that layout; 0 for what it will refuse."""
        q = self.inputs[0][1]
        if layout is None or len(q.shape) != 3:
            return 0
        return q.shape[0] * q.shape[1] * layout.value_dim * q.array.itemsize

    def _taken(self, result: HostTensor) -> TensorT:
        if self.out is None:
            return like(self.q, result)
        out, view = self.out
        view.copy_from(result)
        return out


def _set_span(span: Any, region: Region, offset: int, num_bytes: int) -> None:
    span.arena_id, span.offset, span.num_bytes = region.arena_id, offset, num_bytes


def prefill(
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
    out: TensorT | None,
) -> AttentionCall[TensorT]:
    """num_tokens: new tokens of each sequence; None for all of T, of the only one."""
    return _attention("Prefill", owner, layer, states, num_tokens, tensors, options, out)


def decode(
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
    out: TensorT | None,
) -> AttentionCall[TensorT]:
    """num_tokens: as for `prefill`."""
    return _attention("Decode", owner, layer, states, num_tokens, tensors, options, out)


def _attention(
    method: str,
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
    out: TensorT | None,
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

    place = None if out is None else (out, writable_view(out, "out"))
    return AttentionCall(method, request, q, tuple(inputs), place, advance)
