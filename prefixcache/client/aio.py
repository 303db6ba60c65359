"""The client for asyncio: the twin of `sync`, which differs by await; a test compares the two.

What can be asked of a daemon; what is sent and what a reply means is in `messages` and `*_calls`,
the way there in `aio_connection`. A client may be used by many tasks of one event loop at once, a
sequence by one at a time. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
import numpy.typing as npt

from prefixcache.client import attention_calls, events, messages, sequence_calls, session_calls
from prefixcache.client.aio_connection import AsyncConnection
from prefixcache.client.aio_events import AsyncEventStream
from prefixcache.client.aio_sequence import AsyncSequence, OpeningSequence
from prefixcache.client.aio_steps import AsyncStepStream
from prefixcache.client.arena import (
    DEFAULT_ARENA_BYTES,
    lent_or_new,
)
from prefixcache.client.channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_SESSION_TTL_S,
    DEFAULT_TIMEOUT_S,
)
from prefixcache.client.credentials import (
    NO_CREDENTIALS,
    Credentials,
)
from prefixcache.client.events import EventPosition
from prefixcache.client.lease import owner_of, rows_by_lease
from prefixcache.client.results import SequenceInfo, ServerInfo, SessionInfo
from prefixcache.client.sequence_state import SequenceState
from prefixcache.client.tensors import TensorT, empty
from prefixcache.client.unanswered_steps import UnansweredSteps
from prefixcache.core.stats import PoolStats
from prefixcache.errors import (
    SessionLostError,
)
from prefixcache.types import (
    PLAIN_ATTENTION,
    AppendResult,
    AttentionOptions,
    CacheUse,
    CommitResult,
    Explanation,
    ExtraKeys,
    FullHit,
    LookupResult,
    ResultCode,
    SequenceOrder,
)


class AsyncClient:
    """A connection to one daemon, and the owner of the sequences made through it.

    target: `unix:/path` or `host:port`.
    timeout_s: deadline of each call, repeats by gRPC included; every method takes another.
    expected_fingerprint: 32 bytes; FingerprintMismatchError if the daemon's layout or model is
        another. Without it the daemon of the first call sets what later calls expect, so that a
        daemon that was restarted with another layout refuses.
    max_message_bytes: largest request or reply; the daemon has a limit of its own.
    session_ttl_s: sequences live in a session of the daemon, which the first of them opens. It ends
        when the client is closed or its process dies, and when the daemon has not heard of it for
        so long. None for no session: sequences live until the client has made no call for the
        daemon's `owner_ttl_s`.
    client_name: what operators see of the session, at most 128 bytes.
    credentials: what a daemon with access control asks for. On a Unix socket the user that this
        process runs as may be enough, and nothing is to be given.
    arena_bytes: on a Unix socket, tensors of large Prefills and Decodes go through so much memory
        that this client shares with the daemon, and which takes no more than they have needed.
        What finds no room there goes in the message, as it all does for 0.
    channel: instead of a target, a channel that stays the caller's to close; it is best made with
        `channel_options()`.

    To be made while its event loop runs. A task may be cancelled in any call: what Allocate or Fork
    make then is freed, unless the caller named it with a request id, and a Free goes on.

    Nothing connects before the first call, which asks for `server_info`. Raises the errors of
    `prefixcache.errors`: those of the daemon, UnavailableError if it cannot be reached,
    DeadlineExceededError, and InvalidArgumentError for what cannot be sent. Calls that are safe
    to repeat are, by gRPC, while the daemon is UNAVAILABLE. After a DeadlineExceededError it is
    not known whether the daemon did its part: the same call once more finds out. Sequences that
    `sequence` or `fork` may have made then are freed ahead of a later call and in `close`, unless
    the caller named them with a request id.

    tokens: integers of 0 to 2^32 - 1 in a list, a numpy array or a torch tensor. Those of a prompt
    must not be changed until the call has returned.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        expected_fingerprint: bytes | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        session_ttl_s: float | None = DEFAULT_SESSION_TTL_S,
        client_name: str = "",
        credentials: Credentials = NO_CREDENTIALS,
        arena_bytes: int = DEFAULT_ARENA_BYTES,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        self._connection = AsyncConnection(
            target,
            channel,
            timeout_s=timeout_s,
            expected_fingerprint=expected_fingerprint,
            max_message_bytes=max_message_bytes,
            session_ttl_s=session_ttl_s,
            client_name=client_name,
            credentials=credentials,
            arena_bytes=arena_bytes,
        )

    async def close(self) -> None:
        """End the session, with all sequences that are not freed, and the connection.

        Without a session, such sequences live on until the owner's TTL. In a process that was
        forked from the client's own, it closes nothing.
        """
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- the daemon

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Ask the daemon what it is. Raises FingerprintMismatchError."""
        return await self._connection.server_info(timeout_s=timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        """One consistent snapshot of counters and gauges."""
        return await self._connection.call(messages.stats(), timeout_s)

    async def reset_cache(self, force: bool = False, *, timeout_s: float | None = None) -> int:
        """Drop every cached hash; returns how many there were. Never repeated by itself.

        Raises BlocksInUseError while blocks are referenced, unless forced.
        """
        return await self._connection.call(messages.reset_cache(force), timeout_s)

    async def list_sequences(self, *, timeout_s: float | None = None) -> list[SequenceInfo]:
        """All live sequences of all clients, oldest first, in calls of 1000 each."""
        call = self._connection.call
        page = await call(messages.list_sequences(""), timeout_s)
        found = list(page.sequences)
        while page.next_page_token:
            page = await call(messages.list_sequences(page.next_page_token), timeout_s)
            found += page.sequences
        return found

    async def first_sequences(
        self, order: SequenceOrder, count: int, *, timeout_s: float | None = None
    ) -> list[SequenceInfo]:
        """Live sequences of all clients, the first `count` in that order, 1 to 1000."""
        page = await self._connection.call(messages.first_sequences(order, count), timeout_s)
        return list(page.sequences)

    async def list_sessions(self, *, timeout_s: float | None = None) -> list[SessionInfo]:
        """All sessions of all clients, oldest first, in calls of 1000 each."""
        call = self._connection.call
        page = await call(session_calls.list_sessions(""), timeout_s)
        found = list(page.sessions)
        while page.next_page_token:
            page = await call(session_calls.list_sessions(page.next_page_token), timeout_s)
            found += page.sessions
        return found

    # ---- prompts

    async def lookup(
        self,
        tokens: npt.ArrayLike,
        *,
        extra_keys: ExtraKeys | None = None,
        num_lookahead_tokens: int = 0,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        want_hashes: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        """What `sequence` would find now. Changes nothing; valid until the pool changes.

        want_hashes: return the hash of each full block of the prompt too.
        """
        call = messages.lookup(tokens, extra_keys, num_lookahead_tokens, full_hit, want_hashes)
        return await self._connection.call(call, timeout_s)

    async def explain(
        self,
        tokens: npt.ArrayLike,
        *,
        extra_keys: ExtraKeys | None = None,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Explanation:
        """Why `sequence` would find no more cached than it would. Needs the role of an admin.

        Changes nothing; valid until the pool changes. tenant: whose prompt it is; one's own if left
        out. Raises InvalidArgumentError for one that is not in the auth file.
        """
        call = messages.explain(tokens, extra_keys, full_hit, cache_use, tenant)
        return await self._connection.call(call, timeout_s)

    def sequence(
        self,
        tokens: npt.ArrayLike,
        *,
        extra_keys: ExtraKeys | None = None,
        num_lookahead_tokens: int = 0,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        resumed: bool = False,
        request_id: str | None = None,
        wait_pending_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> OpeningSequence:
        """Allocate a prompt; `async with` frees it at the end, `await` leaves that to the caller.

        num_lookahead_tokens: slots to reserve for draft tokens.
        resumed: the request was preempted and comes again, which is not counted as a query.
        request_id: names the request within this client, random if not given. The same call with
            the same name is answered with the same sequence as long as that is unchanged: so a
            sequence that a DeadlineExceededError left unknown can be had.
        wait_pending_s: if another sequence is computing the prompt's next blocks, wait so long for
            them to be cached; 0 does not. At most the daemon's `max_wait_pending_s`, and less than
            the timeout. What is still pending then is in `num_pending_tokens`. Who waits for a
            sequence of its own, in one thread, waits in vain.

        Opens a session if there is none, or the one before is lost. Raises NoRoomError,
        ExceedsPoolError, RequestIdConflictError, FingerprintMismatchError, TooManySessionsError,
        TooManySequencesError or DrainingError.
        """
        return OpeningSequence(
            self._allocate(
                tokens,
                extra_keys=extra_keys,
                num_lookahead_tokens=num_lookahead_tokens,
                cache_use=cache_use,
                full_hit=full_hit,
                resumed=resumed,
                request_id=request_id,
                wait_pending_s=wait_pending_s,
                timeout_s=timeout_s,
            )
        )

    # ---- batches

    async def append(
        self,
        sequences: Rows[AsyncSequence],
        tokens: Rows[npt.ArrayLike],
        num_kv_valid: npt.ArrayLike | None = None,
        num_lookahead_tokens: npt.ArrayLike | None = None,
        *,
        extra_keys: Rows[ExtraKeys | None] | None = None,
        timeout_s: float | None = None,
    ) -> list[AppendResult]:
        """Add tokens to many sequences in one call; see `AsyncSequence.append` for the arguments.

        A row that is refused is unchanged, says why in its `code`, and the rest go on; nothing is
        raised for it.
        """
        lease = owner_of(sequences, self._connection.lease)
        call = sequence_calls.append(
            lease.owner, _states(sequences), tokens, num_kv_valid, num_lookahead_tokens, extra_keys
        )
        return await self._connection.call(call, timeout_s, lease)

    async def commit(
        self,
        sequences: Rows[AsyncSequence],
        num_computed_tokens: npt.ArrayLike,
        *,
        timeout_s: float | None = None,
    ) -> list[CommitResult]:
        """Say how many more tokens of each sequence have their K/V; see `AsyncSequence.commit`.

        A row that is refused says why in its `code`; nothing is raised for it.
        """
        lease = owner_of(sequences, self._connection.lease)
        call = sequence_calls.commit(lease.owner, _states(sequences), num_computed_tokens)
        return await self._connection.call(call, timeout_s, lease)

    async def free(
        self, sequences: Rows[AsyncSequence], *, timeout_s: float | None = None
    ) -> list[ResultCode]:
        """End sequences: OK, or NOT_FOUND for one that the daemon does not know any more.

        Those of a session that is lost are none of them; nothing is raised for it.
        """
        codes = [ResultCode.NOT_FOUND] * len(sequences)
        for lease, rows in rows_by_lease(sequences, self._connection.lease).items():
            states = [sequences[row]._state for row in rows]
            found = await self._connection.free(lease, states, timeout_s)
            for row, code in zip(rows, found, strict=True):
                codes[row] = code
        return codes

    async def prefill(
        self,
        layer: int,
        sequences: Rows[AsyncSequence],
        num_tokens: npt.ArrayLike,
        q: TensorT,
        k: TensorT,
        v: TensorT | None,
        options: AttentionOptions = PLAIN_ATTENTION,
        *,
        out: TensorT | None = None,
        timeout_s: float | None = None,
    ) -> TensorT:
        """Attention of new tokens in one layer; their K/V go into the daemon's blocks.

        num_tokens: of each sequence, at least 1; T is their sum, rows one after the other.
        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv], in the layout's dtype, over quantised
            storage too. v is None for latent K/V (see `LatentLayout`), where it is a part of k.
        options: scale, window, soft cap, ALiBi, sinks. Latent K/V need a scale.
        out: where the result goes, in host memory; undefined after a call that failed. With all
            tensors in memory of `empty` nothing is copied.
        Returns [T, Hq, Dv], causal over all tokens so far, cached ones included: out, or a new one
        of q's kind and on its device.

        Each layer goes on where it stands; a prompt may come in chunks. One bad row fails the
        whole call before anything is written: SequenceNotFoundError, SequenceBusyError,
        WrongPositionError, BeyondTokensError, NoStorageError or InvalidArgumentError.
        """
        lease = owner_of(sequences, self._connection.lease)
        call = attention_calls.prefill(
            lease.owner, layer, _states(sequences), num_tokens, (q, k, v), options, out
        )
        return await self._connection.attend(call, timeout_s, lease)

    async def decode(
        self,
        layer: int,
        sequences: Rows[AsyncSequence],
        q: TensorT,
        k: TensorT,
        v: TensorT | None,
        options: AttentionOptions = PLAIN_ATTENTION,
        num_tokens: npt.ArrayLike | None = None,
        *,
        out: TensorT | None = None,
        timeout_s: float | None = None,
    ) -> TensorT:
        """`prefill` for one new token of each of many sequences, or `num_tokens` of each."""
        if num_tokens is None:
            num_tokens = [1] * len(sequences)
        lease = owner_of(sequences, self._connection.lease)
        call = attention_calls.decode(
            lease.owner, layer, _states(sequences), num_tokens, (q, k, v), options, out
        )
        return await self._connection.attend(call, timeout_s, lease)

    async def empty(
        self, shape: Rows[int], dtype: object, *, timeout_s: float | None = None
    ) -> Any:
        """A tensor without content, for Prefill and Decode: on a Unix socket in shared memory.

        shape: of q, k, v or out. dtype: of torch, for a torch tensor, or of numpy, for an array. A
        call takes it from there, and puts its result there, without a copy; during the call it must
        not be changed. It counts against `arena_bytes` until it and its views are gone. If there is
        no such memory, and after a call that failed, it is a tensor like others. A forked child
        must not touch it (SIGSEGV). Raises InvalidArgumentError.
        """
        info = await self._connection.ready(timeout_s)
        arena = await self._connection.arena(info)
        return empty(shape, dtype, partial(lent_or_new, arena))

    # ---- steps

    async def steps(self, *, timeout_s: float | None = None) -> AsyncStepStream:
        """A stream for the calls of an engine's steps, all of a step in one message.

        Cheaper than the calls one by one, and the next step may be sent before the answer is
        there: for an engine that allocates, appends, commits and frees at every step. One stream
        an engine; close it before the client. timeout_s: of the first call, which asks for the
        daemon's description and may open the session, which the stream cannot outlive.

        TooManyStreamsError at the first answer if the daemon has no more streams to give.
        """
        connection = self._connection
        info = await connection.ready(timeout_s)
        lease = await connection.leased(timeout_s)
        await connection.free_due(lease)
        steps = UnansweredSteps(lease, info, lambda state: AsyncSequence(connection, lease, state))
        return AsyncStepStream(
            connection.stubs["Step"], steps, connection.timeout_s, connection.home
        )

    # ---- events

    async def watch_events(
        self,
        start: EventPosition | None = None,
        *,
        snapshot: bool = True,
        timeout_s: float | None = None,
    ) -> AsyncEventStream:
        """What becomes cached and what no longer is, as it happens. Needs the role of an admin.

        A snapshot of what is cached comes first, and again after a loss, unless `snapshot` is
        False. start: the `position` of an earlier stream, to go on from there without one.
        timeout_s: of the first call, which asks for the daemon's description; events are waited
        for without a limit.

        The stream raises EventsOffError if the daemon keeps no events, EventsGoneError if it has
        those from `start` on no more, and TooManyStreamsError.
        """
        connection = self._connection
        await connection.ready(timeout_s)
        request = events.request(start, snapshot)
        return AsyncEventStream(connection.stubs["WatchEvents"](iter([request])), connection.home)

    # ---- inside

    async def _allocate(
        self, tokens: npt.ArrayLike, *, timeout_s: float | None, **arguments: Any
    ) -> AsyncSequence:
        connection = self._connection
        info = await connection.ready(timeout_s)
        # Without its owner yet: a bad argument is refused before a session is opened.
        limit_s = connection.timeout_s if timeout_s is None else timeout_s
        call = sequence_calls.allocate(b"", info, tokens, timeout_s=limit_s, **arguments)
        try:
            lease = await connection.leased(timeout_s)
            call.request.owner = lease.owner
            state = await connection.send(call, timeout_s, lease)
        except SessionLostError:
            # Nothing was done in a session that is gone.
            lease = await connection.leased(timeout_s)
            call.request.owner = lease.owner
            state = await connection.send(call, timeout_s, lease)
        return AsyncSequence(connection, lease, state)


def _states(sequences: Rows[AsyncSequence]) -> list[SequenceState]:
    return [sequence._state for sequence in sequences]
