"""An asyncio client's handle on one sequence of the daemon, the twin of `sync_sequence`.

Owns the mirror of where the sequence stands; `AsyncClient` sends its calls. One task at a time.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from collections.abc import Sequence as Rows
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt

from prefixcache.client import attention_calls, sequence_calls
from prefixcache.client.lease import Lease
from prefixcache.client.sequence_state import SequenceState, SequenceView
from prefixcache.client.tensors import TensorT
from prefixcache.errors import PrefixCacheError
from prefixcache.types import (
    PLAIN_ATTENTION,
    AppendResult,
    AttentionOptions,
    CommitResult,
    ExtraKeys,
)

if TYPE_CHECKING:
    from prefixcache.client.aio_connection import AsyncConnection


class AsyncSequence(SequenceView):
    """One request's tokens and blocks in the daemon, made by `AsyncClient.sequence` or `fork`.

    It knows where it stands, so no call takes a position. `async with` frees it at the end, also
    after an error. Its properties are as of the last reply. Block ids change only in the reply to a
    call on this sequence. Errors: as for `AsyncClient`, SequenceNotFoundError once it is freed,
    SessionLostError once its session is gone.
    """

    def __init__(self, connection: AsyncConnection, lease: Lease, state: SequenceState) -> None:
        self._connection = connection
        self._lease = lease
        self._state = state

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.free()
        except PrefixCacheError as failure:
            if error is None:
                raise
            error.add_note(f"and the sequence could not be freed: {failure}")

    async def append(
        self,
        tokens: npt.ArrayLike,
        num_kv_valid: int = 0,
        num_lookahead_tokens: int = 0,
        *,
        extra_keys: ExtraKeys | None = None,
        timeout_s: float | None = None,
    ) -> AppendResult:
        """Add tokens and the blocks that they need. The result is `OK`; a refusal is raised.

        num_kv_valid: how many of the tokens already have their K/V: accepted drafts, that Decode
            has run in the lookahead slots. What it has run beyond them is cut off.
        num_lookahead_tokens: slots to reserve for draft tokens after them.
        extra_keys: of these tokens, with offsets from the sequence's start.

        A shared, cached last block is copied first: `copies`. Without K/V storage in the daemon
        the caller copies it, before its next call. Raises NoRoomError, ExceedsPoolError,
        SequenceBusyError or WrongPositionError.
        """
        call = sequence_calls.append_one(
            self._lease.owner, self._state, tokens, num_kv_valid, num_lookahead_tokens, extra_keys
        )
        return await self._connection.call(call, timeout_s, self._lease)

    async def commit(
        self, num_computed_tokens: int, *, timeout_s: float | None = None
    ) -> CommitResult:
        """So many more tokens have their K/V in all layers: full blocks become findable.

        Of tokens that the caller has computed: without K/V storage in the daemon, or through an
        attached view (see `prefixcache.attach`), else StorageOwnedError. It goes on where the layer
        stands that the daemon knows to be least far. Raises BeyondTokensError, SequenceBusyError or
        WrongPositionError.
        """
        call = sequence_calls.commit_one(self._lease.owner, self._state, num_computed_tokens)
        return await self._connection.call(call, timeout_s, self._lease)

    async def fork(
        self,
        num_children: int = 1,
        *,
        request_ids: Rows[str] | None = None,
        timeout_s: float | None = None,
    ) -> list[AsyncSequence]:
        """Children that share all blocks; each is to be freed. Both sides lose their lookahead.

        request_ids: one a child, as in `AsyncClient.sequence`; random if not given.
        Raises NotComputedError while tokens are left to compute, SequenceBusyError,
        WrongPositionError, RequestIdConflictError or DrainingError.
        """
        call = sequence_calls.fork(self._lease.owner, self._state, num_children, request_ids)
        return [
            AsyncSequence(self._connection, self._lease, child)
            for child in await self._connection.call(call, timeout_s, self._lease)
        ]

    async def truncate(self, num_tokens: int, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """Keep the first `num_tokens` (1 to the present length); all lookahead goes.

        Returns the block ids dropped, in table order. Raises SequenceBusyError.
        """
        call = sequence_calls.truncate(self._lease.owner, self._state, num_tokens)
        return await self._connection.call(call, timeout_s, self._lease)

    async def free(self, *, timeout_s: float | None = None) -> None:
        """Give the blocks back; full ones stay findable. Once freed, or unknown to the daemon,
        there is nothing more to do."""
        if not self.is_freed:
            await self._connection.free(self._lease, [self._state], timeout_s)

    async def prefill(
        self,
        layer: int,
        q: TensorT,
        k: TensorT,
        v: TensorT | None,
        options: AttentionOptions = PLAIN_ATTENTION,
        *,
        out: TensorT | None = None,
        timeout_s: float | None = None,
    ) -> TensorT:
        """`AsyncClient.prefill` of this sequence alone, with all T tokens of q."""
        call = attention_calls.prefill(
            self._lease.owner, layer, [self._state], None, (q, k, v), options, out
        )
        return await self._connection.attend(call, timeout_s, self._lease)

    async def decode(
        self,
        layer: int,
        q: TensorT,
        k: TensorT,
        v: TensorT | None,
        options: AttentionOptions = PLAIN_ATTENTION,
        *,
        out: TensorT | None = None,
        timeout_s: float | None = None,
    ) -> TensorT:
        """`AsyncClient.decode` of this sequence alone, with all T tokens of q."""
        call = attention_calls.decode(
            self._lease.owner, layer, [self._state], None, (q, k, v), options, out
        )
        return await self._connection.attend(call, timeout_s, self._lease)


class OpeningSequence:
    """A sequence on its way: `await` it for the `AsyncSequence`, or `async with` it."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncSequence]) -> None:
        self._opening = opening
        self._sequence: AsyncSequence | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSequence]:
        return self._opening.__await__()

    async def __aenter__(self) -> AsyncSequence:
        self._sequence = await self._opening
        return self._sequence

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._sequence is not None
        await self._sequence.__aexit__(kind, error, traceback)
