"""One attention call, or one copy-on-write: the block manager and the K/V memory together.

Takes the core's lock for table work only; kernels and copies run outside it, over tickets that
keep the blocks in place. Safe to call from many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import check_options
from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.step_batches import StepBatches
from prefixcache.attention.write_kv import write_kv
from prefixcache.core.append_batch import AppendBatch, AppendedBatch
from prefixcache.core.sequences import Sequences
from prefixcache.core.sessions import CallOrder
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache
from prefixcache.storage.layout import DTYPE_BYTES, Layout
from prefixcache.storage.pool_memory import PoolMemory
from prefixcache.types import AttentionOptions, HostTensor

Attend = Callable[..., torch.Tensor]
"""`prefill` or `decode`."""
Columns: TypeAlias = tuple[list[int], list[int], list[int]]
"""Sequence ids, start positions and token counts of a call, `[S]` each."""
Memory: TypeAlias = npt.NDArray[np.uint8]
"""Bytes that may be written to, `[num_bytes]`."""
NewTokens: TypeAlias = tuple[HostTensor, HostTensor, HostTensor | None]
"""q, k and v of a call; no v for latent K/V."""


class Engine:
    """Prefill, Decode and Append over K/V memory.

    around_kernels: entered while the kernels of a call run and their output comes to the host.
    """

    def __init__(
        self,
        sequences: Sequences,
        memory: PoolMemory,
        around_kernels: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._sequences = sequences
        self._batches = StepBatches(memory.layout.block_size)
        self._around_kernels = around_kernels
        self.memory = memory

    def append(
        self, owner: bytes, batch: AppendBatch, order: CallOrder | None = None, account: int = 0
    ) -> AppendedBatch:
        """`RowCalls.append`, with the copies made before it returns.

        order: as for `LiveSequences.take_turn`, in every call.
        """
        with self._sequences.lock:
            self._sequences.live.take_turn(owner, order)
            appended = self._sequences.rows.append(owner, batch, account)
            ticket = None
            if appended.copy_sources:
                has_copies = np.frombuffer(appended.num_copies, dtype=np.uint32) > 0
                copied = np.frombuffer(batch.sequence_ids, dtype="<u8")[has_copies]
                ticket = self._sequences.running.begin_copies(owner, copied.tolist())
        if ticket is not None:
            try:
                spans = self.memory.spans
                copy_blocks(
                    spans,
                    [copy.source for copy in ticket.copies],
                    spans,
                    [copy.destination for copy in ticket.copies],
                )
            finally:
                with self._sequences.lock:
                    self._sequences.running.end_copies(ticket)
        return appended

    def prefill(
        self,
        owner: bytes,
        layer: int,
        columns: Columns,
        tensors: NewTokens,
        options: AttentionOptions,
        order: CallOrder | None = None,
        out: Memory | None = None,
    ) -> HostTensor:
        """Write K/V of new tokens of one layer and attend over all tokens so far.

        columns: sequence ids, start positions and token counts, `[S]` each. tensors: q
        `[T, Hq, D]`, k `[T, Hkv, D]` and v `[T, Hkv, Dv]`, of the layout's dtype; v is None for
        latent K/V, which need a scale. Returns out `[T, Hq, Dv]`; in the memory `out`, of as many
        bytes, if that is given.
        Raises InvalidArgumentError and the errors of `RunningCalls.begin_attention`; nothing has
        been written then.
        """
        return self._attend(prefill, owner, layer, columns, tensors, options, order, out)

    def decode(
        self,
        owner: bytes,
        layer: int,
        columns: Columns,
        tensors: NewTokens,
        options: AttentionOptions,
        order: CallOrder | None = None,
        out: Memory | None = None,
    ) -> HostTensor:
        """`prefill` for one or a few tokens of each of many sequences."""
        return self._attend(decode, owner, layer, columns, tensors, options, order, out)

    def _attend(
        self,
        attend: Attend,
        owner: bytes,
        layer: int,
        columns: Columns,
        tensors: NewTokens,
        options: AttentionOptions,
        order: CallOrder | None,
        out: Memory | None,
    ) -> HostTensor:
        layout = self.memory.layout
        if not 0 <= layer < layout.num_layers:
            raise InvalidArgumentError("layer", f"is {layer}, must be below {layout.num_layers}")
        check_new_tokens(layout, tensors, sum(columns[2]))
        _check_out(layout, tensors[0], out)
        cache = self.memory.layer(layer)
        check_options(options, tensors[0].shape[1], is_latent=cache.is_latent)
        q, k = self._to_device(tensors[0]), self._to_device(tensors[1])
        v = None if tensors[2] is None else self._to_device(tensors[2])
        with self._sequences.lock:
            self._sequences.live.take_turn(owner, order)
            ticket = self._sequences.running.begin_attention(owner, layer, *columns)
        written = False
        try:
            batch = self._batches.batch_for(
                columns[0],
                [row.block_table for row in ticket.rows],
                columns[1],
                columns[2],
                [row.first_writable for row in ticket.rows],
            )
            with self._around_kernels():
                write_kv(cache, k, v, batch.slot_mapping)
                result = self._attended(attend, q, cache, batch, options, out)
            written = True
        finally:
            with self._sequences.lock:
                self._sequences.running.end_attention(ticket, written=written)
        return result

    def _attended(
        self,
        attend: Attend,
        q: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        options: AttentionOptions,
        out: Memory | None,
    ) -> HostTensor:
        if out is None:
            return _to_host(attend(q, cache, batch, options))
        shape = (*q.shape[:2], cache.values.shape[3])
        target = torch.from_numpy(out).view(q.dtype).reshape(shape)
        if q.device.type == "cpu":
            attend(q, cache, batch, options, out=target)
        else:
            target.copy_(attend(q, cache, batch, options))
        return _to_host(target)

    def _to_device(self, tensor: HostTensor) -> torch.Tensor:
        data = np.frombuffer(tensor.data, dtype=np.uint8)
        if not data.flags.writeable:
            # Torch wants memory that may be written to. numpy copies without the GIL.
            data = data.copy()
        flat = torch.from_numpy(data)
        return flat.view(self.memory.dtype).reshape(tensor.shape).to(self.memory.device)


class Described(Protocol):
    """A tensor's type, by the name that layouts have for it, and shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_new_tokens(
    layout: Layout, tensors: tuple[Described, Described, Described | None], num_tokens: int
) -> None:
    """q, k and v of a call of so many tokens. Raises InvalidArgumentError, naming the field."""
    q, k, v = tensors
    if layout.kind == "latent" and v is not None:
        raise InvalidArgumentError("v", "is a part of k in latent K/V, and must be left out")
    if layout.kind != "latent" and v is None:
        raise InvalidArgumentError("v", "is missing")
    heads = layout.num_kv_heads
    _check_tensor("q", q, (num_tokens, heads, layout.head_dim), layout.dtype)
    _check_tensor("k", k, (num_tokens, heads, layout.head_dim), layout.dtype)
    if v is not None:
        _check_tensor("v", v, (num_tokens, heads, layout.value_dim), layout.dtype)


def _check_out(layout: Layout, q: HostTensor, out: Memory | None) -> None:
    num_tokens, num_heads, _ = q.shape
    num_bytes = num_tokens * num_heads * layout.value_dim * DTYPE_BYTES[q.dtype]
    if out is not None and len(out) != num_bytes:
        raise InvalidArgumentError("out.num_bytes", f"is {len(out)}, the output has {num_bytes}")


def _check_tensor(name: str, tensor: Described, shape: tuple[int, int, int], dtype: str) -> None:
    """q may have a multiple of the heads."""
    if tensor.dtype != dtype:
        raise InvalidArgumentError(f"{name}.data_type", f"is {tensor.dtype}, must be {dtype}")
    num_tokens, heads, dim = shape
    num_heads = tensor.shape[1] if len(tensor.shape) == 3 else 0
    heads_fit = num_heads == heads or (name == "q" and num_heads and num_heads % heads == 0)
    if not heads_fit or tensor.shape[::2] != (num_tokens, dim):
        wanted = f"a multiple of {heads}" if name == "q" else str(heads)
        raise InvalidArgumentError(
            f"{name}.shape", f"is {list(tensor.shape)}, must be [{num_tokens}, {wanted}, {dim}]"
        )


def _to_host(tensor: torch.Tensor) -> HostTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        tensor.contiguous().cpu().view(torch.uint8).numpy()
    )
    return HostTensor(dtype, tuple(tensor.shape), data.reshape(-1).data)
