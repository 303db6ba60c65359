"""One attention call, or one copy-on-write: the block manager and the K/V memory together.

Takes the core's lock for table work only; kernels and copies run outside it, over tickets that
keep the blocks in place. Safe to call from many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.write_kv import write_kv
from prefixcache.core.sequence import AppendRow, AttentionTicket
from prefixcache.core.sequences import Sequences
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.kv_cache import KVCache
from prefixcache.storage.pool_memory import PoolMemory
from prefixcache.types import AppendResult, AttentionOptions, HostTensor

Attend = Callable[[torch.Tensor, KVCache, AttentionBatch, AttentionOptions], torch.Tensor]


class Engine:
    """Prefill, Decode and Append over K/V memory."""

    def __init__(self, sequences: Sequences, memory: PoolMemory) -> None:
        self._sequences = sequences
        self.memory = memory

    def append(self, owner: bytes, rows: Sequence[AppendRow]) -> list[AppendResult]:
        """`Sequences.append`, with the copies made before it returns."""
        with self._sequences.lock:
            results = self._sequences.append(owner, rows)
            applied = [
                row.sequence_id for row, result in zip(rows, results, strict=True) if result.copies
            ]
            ticket = self._sequences.begin_copies(owner, applied) if applied else None
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
                    self._sequences.end_copies(ticket)
        return results

    def prefill(
        self,
        owner: bytes,
        layer: int,
        columns: tuple[list[int], list[int], list[int]],
        tensors: tuple[HostTensor, HostTensor, HostTensor],
        options: AttentionOptions,
    ) -> HostTensor:
        """Write K/V of new tokens of one layer and attend over all tokens so far.

        columns: sequence ids, start positions and token counts, `[S]` each. tensors: q
        `[T, Hq, D]`, k and v `[T, Hkv, D]`, of the storage's dtype. Returns out `[T, Hq, D]`.
        Raises InvalidArgumentError and the errors of `Sequences.begin_attention`; nothing has
        been written then.
        """
        return self._attend(prefill, owner, layer, columns, tensors, options)

    def decode(
        self,
        owner: bytes,
        layer: int,
        columns: tuple[list[int], list[int], list[int]],
        tensors: tuple[HostTensor, HostTensor, HostTensor],
        options: AttentionOptions,
    ) -> HostTensor:
        """`prefill` for one or a few tokens of each of many sequences."""
        return self._attend(decode, owner, layer, columns, tensors, options)

    def _attend(
        self,
        attend: Attend,
        owner: bytes,
        layer: int,
        columns: tuple[list[int], list[int], list[int]],
        tensors: tuple[HostTensor, HostTensor, HostTensor],
        options: AttentionOptions,
    ) -> HostTensor:
        layout = self.memory.layout
        if not 0 <= layer < layout.num_layers:
            raise InvalidArgumentError("layer", f"is {layer}, must be below {layout.num_layers}")
        q, k, v = self._check_tensors(tensors, sum(columns[2]))
        with self._sequences.lock:
            ticket = self._sequences.begin_attention(owner, layer, *columns)
        written = False
        try:
            batch = _batch_of(ticket, layout.block_size)
            cache = self.memory.layer(layer)
            write_kv(cache, k, v, batch.slot_mapping)
            out = _to_host(attend(q, cache, batch, options))
            written = True
        finally:
            with self._sequences.lock:
                self._sequences.end_attention(ticket, written=written)
        return out

    def _check_tensors(
        self, tensors: tuple[HostTensor, HostTensor, HostTensor], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layout = self.memory.layout
        heads = layout.num_kv_heads
        for name, tensor in zip("qkv", tensors, strict=True):
            if tensor.dtype != layout.dtype:
                raise InvalidArgumentError(
                    f"{name}.data_type", f"is {tensor.dtype}, the storage is {layout.dtype}"
                )
            fits = len(tensor.shape) == 3 and tensor.shape[::2] == (num_tokens, layout.head_dim)
            num_heads = tensor.shape[1] if len(tensor.shape) == 3 else 0
            heads_fit = (
                num_heads > 0 and num_heads % heads == 0 if name == "q" else num_heads == heads
            )
            if not fits or not heads_fit:
                wanted = f"a multiple of {heads}" if name == "q" else str(heads)
                raise InvalidArgumentError(
                    f"{name}.shape",
                    f"is {list(tensor.shape)}, must be [{num_tokens}, {wanted}, {layout.head_dim}]",
                )
        q, k, v = (self._to_device(tensor) for tensor in tensors)
        return q, k, v

    def _to_device(self, tensor: HostTensor) -> torch.Tensor:
        # frombuffer needs a writable buffer, and empty ones are refused.
        flat = torch.frombuffer(bytearray(tensor.data), dtype=self.memory.dtype)
        return flat.reshape(tensor.shape).to(self.memory.device)


def _batch_of(ticket: AttentionTicket, block_size: int) -> AttentionBatch:
    rows = ticket.rows
    return make_batch(
        [row.block_table for row in rows],
        [row.start_position for row in rows],
        [row.num_tokens for row in rows],
        [row.first_writable for row in rows],
        block_size,
    )


def _to_host(tensor: torch.Tensor) -> HostTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        tensor.contiguous().cpu().view(torch.uint8).numpy()
    )
    return HostTensor(dtype, tuple(tensor.shape), data.tobytes())
