"""Prefill and Decode of sequences: tensors and positions -> request, reply -> tensor. No I/O.

A call that fails leaves the positions as they were, so it may come again: the daemon computes the
output of a repeat again and writes nothing. Not thread-safe, as `SequenceState`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

from prefixcache.client.columns import uint32, uint32_column
from prefixcache.client.messages import Call
from prefixcache.client.sequence_calls import States, check_length, sequence_ids
from prefixcache.client.tensors import TensorT, like, to_host
from prefixcache.rpc.codec import set_options, set_tensor, tensor_from_wire
from prefixcache.rpc.wire import column32, twin
from prefixcache.types import AttentionOptions

Tensors: TypeAlias = tuple[TensorT, TensorT, TensorT | None]
"""q, k and v; no v for latent K/V."""


def prefill(
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
) -> Call[TensorT]:
    """num_tokens: new tokens of each sequence; None for all of T, of the only one."""
    return _attention("Prefill", owner, layer, states, num_tokens, tensors, options)


def decode(
    owner: bytes,
    layer: int,
    states: States,
    num_tokens: npt.ArrayLike | None,
    tensors: Tensors[TensorT],
    options: AttentionOptions,
) -> Call[TensorT]:
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
) -> Call[TensorT]:
    layer = uint32(layer, "layer")
    starts = [state.position(layer) for state in states]
    q, k, v = tensors
    host_q = to_host(q, "q")
    if num_tokens is None:
        num_tokens = list(host_q.shape[:1])
    counts = uint32_column(num_tokens, "num_tokens").tolist()
    check_length(counts, "num_tokens", states)
    request = twin(f"{method}Request")()
    request.batch.owner = owner
    request.batch.layer = layer
    request.batch.sequence_ids = sequence_ids(states)
    request.batch.start_positions = column32(starts)
    request.batch.num_tokens = column32(counts)
    set_options(request.batch, options)
    set_tensor(request.q, host_q)
    set_tensor(request.k, to_host(k, "k"))
    if v is not None:
        set_tensor(request.v, to_host(v, "v"))

    def read(reply: Any) -> TensorT:
        out = like(q, tensor_from_wire(reply.out, "out"))
        for state, start, count in zip(states, starts, counts, strict=True):
            state.advanced(layer, start + count)
        return out

    return Call(method, request, read)
