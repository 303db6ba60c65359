"""The pool as an attached process sees it: views of all blocks, and attention that runs here.

Owns the mapping and the right to it. What it does is what the daemon does in Prefill and Decode,
with the same code, but for the table work, which the daemon has done in Allocate and Append: a
client knows where its sequences stand. No tensor crosses the wire.

**What keeps whom from what.** The daemon gives a sequence's blocks to nobody else as long as the
sequence lives, and says by a flag in shared memory when its session ends, before it gives any away.
Each call looks there before it writes and after it has computed, so a result over blocks that were
others' by then is never returned. A process that stood still in the middle of a write may go on
later: what its session had not committed is kept from everybody until it has ended, or has closed
its view. Committed blocks are protected from honest writers only: whoever may write can write
anywhere, so write access is for trusted processes.

**When others see what is written.** A Commit says that K/V are in place. On CPU a write that has
returned is. On a GPU a call waits for its stream before it returns; who writes through `layer`
waits for it by `torch.cuda.synchronize` before the Commit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence as Rows
from dataclasses import fields
from types import TracebackType
from typing import Self

import numpy.typing as npt
import torch

from prefixcache.attached.planned_calls import CallPlanner
from prefixcache.attached.tensors import new_tokens, shaped_like
from prefixcache.attention.checks import check_options
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.write_kv import write_kv
from prefixcache.client.attachment import Attachment
from prefixcache.client.sequence_state import SequenceView
from prefixcache.client.sequence_use import in_use
from prefixcache.client.sync import Client
from prefixcache.client.tensors import TensorT
from prefixcache.engine import Attend
from prefixcache.errors import FailedPreconditionError, UnavailableError
from prefixcache.rpc._pb import attach_pb2
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.kv_cache import KVCache
from prefixcache.storage.layout import Layout
from prefixcache.storage.pool_views import PoolViews
from prefixcache.storage.shared_memory import map_shared_memory
from prefixcache.types import PLAIN_ATTENTION, AttentionOptions


class PoolView:
    """The pool of one daemon, mapped; made by `prefixcache.attach`.

    It is of one session of the client: that which was open, or was opened, when it was made. It is
    of use until that session is lost, the daemon ends, or it is closed; then its calls raise
    SessionLostError, or FailedPreconditionError once closed, and `attach` makes another one. A
    daemon's end is noticed when a step begins: what the rest of a step computes is right still.

    Many threads may use it at once, a sequence one at a time: while a call runs over it, its free,
    append, truncate and fork raise SequenceBusyError, and so does a call while one of these is
    under way, or has had no answer and was not made again. In a forked child it raises
    ForkedClientError, and the memory is not there.

    client: made for it by `attach`; None if it was the caller's.
    """

    def __init__(self, attachment: Attachment, client: Client | None = None) -> None:
        self.client = client
        self._attachment = attachment
        try:
            self._views = _map(attachment)
        except BaseException:
            attachment.end()
            raise
        self._planner = CallPlanner(
            attachment.lease, attachment.layout.block_size, attachment.check_daemon
        )
        self._lock = threading.Lock()
        self._is_idle = threading.Condition(self._lock)
        self._num_running = 0
        self._is_closed = False

    # ---- what it is

    @property
    def layout(self) -> Layout:
        return self._attachment.layout

    @property
    def fingerprint(self) -> bytes:
        """Identity of the K/V, 32 bytes; as in `ServerInfo`."""
        return self._attachment.info.fingerprint

    @property
    def num_blocks(self) -> int:
        return self._attachment.info.num_blocks

    @property
    def device(self) -> torch.device:
        """Where the pool is, and q, k, v and out."""
        return self._views.device

    @property
    def is_writable(self) -> bool:
        return self._attachment.is_writable

    @property
    def is_valid(self) -> bool:
        """Whether a call could succeed now."""
        return not self._is_closed and self._attachment.holds

    def layer(self, layer: int) -> KVCache:
        """K and V of one layer in all blocks, `[N, Hkv, B, D]` each: views of the pool itself.

        For an engine that writes by `write_kv`, or runs kernels of its own, in the slots of its
        sequences' block tables: it asks `check` before and after, and then commits. Nothing may use
        them after `close`. Through a view for reading, a write ends the process (SIGSEGV).
        """
        self.check()
        return self._views.layer(layer)

    def check(self) -> None:
        """Raises SessionLostError, or FailedPreconditionError, if it is not valid any more.

        What was computed over blocks of a live sequence before a check that passes is right.
        """
        if self._is_closed:
            raise FailedPreconditionError("the view is closed")
        self._attachment.check()

    # ---- attention

    def prefill(
        self,
        layer: int,
        sequences: Rows[SequenceView],
        num_tokens: npt.ArrayLike,
        q: TensorT,
        k: TensorT,
        v: TensorT | None,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> TensorT:
        """`Client.prefill`, computed here: new K/V go into the sequences' blocks, then q attends.

        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv], of the layout's dtype, on the view's device.
        Returns [T, Hq, Dv], of q's kind. K/V of a token whose block was a hit are not written.

        The daemon learns of it by `Sequence.commit` alone, once all layers have the tokens. Until
        then Prefill and Decode of the daemon refuse to go on (WrongPositionError), Fork too.

        Raises what `Client.prefill` does, but for refusals of the daemon, ReadOnlyViewError if K/V
        would have to be written and the view is for reading, and SessionLostError. Nothing has been
        written then, but by a SessionLostError that came of it meanwhile.
        """
        return self._attend(prefill, layer, sequences, num_tokens, (q, k, v), options)

    def decode(
        self,
        layer: int,
        sequences: Rows[SequenceView],
        q: TensorT,
        k: TensorT,
        v: TensorT | None,
        options: AttentionOptions = PLAIN_ATTENTION,
        num_tokens: npt.ArrayLike | None = None,
    ) -> TensorT:
        """`prefill` for one new token of each of many sequences, or `num_tokens` of each."""
        return self._attend(decode, layer, sequences, num_tokens, (q, k, v), options)

    def _attend(
        self,
        attend: Attend,
        layer: int,
        sequences: Rows[SequenceView],
        num_tokens: npt.ArrayLike | None,
        tensors: tuple[TensorT, TensorT, TensorT | None],
        options: AttentionOptions,
    ) -> TensorT:
        self._begin()
        try:
            with in_use([sequence._state for sequence in sequences]):
                return self._run(attend, layer, sequences, num_tokens, tensors, options)
        finally:
            self._end()

    def _run(
        self,
        attend: Attend,
        layer: int,
        sequences: Rows[SequenceView],
        num_tokens: npt.ArrayLike | None,
        tensors: tuple[TensorT, TensorT, TensorT | None],
        options: AttentionOptions,
    ) -> TensorT:
        cache = self._views.layer(layer)
        call = self._planner.plan(sequences, layer, num_tokens)
        q, k, v = new_tokens(*tensors, self.layout, call.num_tokens)
        check_options(options, q.shape[1], is_latent=cache.is_latent)
        if not self.is_writable:
            call.check_nothing_to_write()
        if call.writes:
            write_kv(cache, k, v, call.batch.slot_mapping)
        out = attend(q, cache, call.batch, options)
        if out.is_cuda:
            torch.cuda.current_stream(out.device).synchronize()
        self._attachment.check_session()
        call.done(layer)
        return shaped_like(tensors[0], out)

    # ---- the end

    def close(self) -> None:
        """Give up the memory, and tell the daemon that nothing is written here any more.

        Waits for calls that are running; what they have computed can still be committed. In a
        forked child it closes nothing. A second call does nothing.
        """
        if not self._attachment.is_here:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._is_idle.wait_for(lambda: not self._num_running)
        self._views.release()
        self._attachment.end()
        if self.client is not None:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """A call that `close` waits for. Raises as `check`, but for the daemon's end."""
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("the view is closed")
            self._attachment.check_session()
            self._num_running += 1

    def _end(self) -> None:
        with self._lock:
            self._num_running -= 1
            if self._is_closed:
                self._is_idle.notify_all()


def _map(attachment: Attachment) -> PoolViews:
    """The descriptor is closed: a forked child has neither it nor the memory."""
    description, layout = attachment.description, attachment.layout
    if attachment.pool_fd is None:
        memory = _open_on_gpu(description.cuda)
    else:
        try:
            size = description.num_blocks * layout.block_bytes
            if os.fstat(attachment.pool_fd).st_size != size:
                raise UnavailableError("the daemon gave memory of another size than its pool's")
            mapped = map_shared_memory(attachment.pool_fd, size, writable=attachment.is_writable)
        finally:
            os.close(attachment.pool_fd)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
    scales = None
    if description.key_scales:
        scales = FixedScales(tuple(description.key_scales), tuple(description.value_scales))
    return PoolViews(layout, memory, scales)


def _open_on_gpu(cuda: attach_pb2.CudaMemory) -> torch.Tensor:
    from prefixcache.storage.cuda_memory import CudaHandle, open_cuda_memory

    return open_cuda_memory(
        CudaHandle(**{field.name: getattr(cuda, field.name) for field in fields(CudaHandle)})
    )
