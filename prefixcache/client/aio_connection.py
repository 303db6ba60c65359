"""An asyncio client's way to its daemon: the twin of `sync_connection`, which differs by await.

Owns the channel, the session, the shared memory and the sending of calls, with what follows from
a call without an answer. What is sent and what a reply means is in `messages` and `*_calls`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence as Rows
from contextlib import suppress
from typing import Any

import grpc

from prefixcache.address import Address
from prefixcache.client import messages, sequence_calls, session_calls
from prefixcache.client.aio_keeper import AsyncSessionKeeper
from prefixcache.client.arena import (
    MIN_CALL_BYTES,
    Arena,
    Arenas,
    Region,
)
from prefixcache.client.attachment import AttachTerms
from prefixcache.client.attention_calls import AttentionCall
from prefixcache.client.channel import (
    SEND_ERRORS,
    channel_options,
    make_stubs,
    resolve_address,
)
from prefixcache.client.credentials import (
    Bearer,
    Credentials,
    make_channel,
)
from prefixcache.client.home_process import AsyncProcess, HomeProcess
from prefixcache.client.lease import Lease
from prefixcache.client.lost_requests import FREE_TIMEOUT_S, LostRequest
from prefixcache.client.messages import Call, ResultT
from prefixcache.client.opening import AsyncOpening
from prefixcache.client.results import ServerInfo
from prefixcache.client.sequence_state import SequenceState
from prefixcache.client.sequence_use import moving
from prefixcache.client.tensors import TensorT
from prefixcache.errors import (
    ArenaLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    SessionLostError,
    UnauthenticatedError,
)
from prefixcache.rpc.status import from_rpc_error
from prefixcache.types import (
    ResultCode,
)

_process = AsyncProcess()
_abandoned: set[asyncio.Task[None]] = set()
"""Calls that go on without the tasks that made them; the event loop holds its tasks weakly."""


class AsyncConnection:
    """Arguments and errors: as `AsyncClient` has them.

    lease: of new sequences, and of the client's other calls.
    """

    def __init__(
        self,
        target: str | None,
        channel: grpc.aio.Channel | None,
        *,
        timeout_s: float,
        expected_fingerprint: bytes | None,
        max_message_bytes: int,
        session_ttl_s: float | None,
        client_name: str,
        credentials: Credentials,
        arena_bytes: int,
    ) -> None:
        if (target is None) == (channel is None):
            raise InvalidArgumentError("target", "give either a target or a channel")
        _process.check()
        self._own_channel: grpc.aio.Channel | None = None
        address: Address | None = None
        if channel is None:
            options = channel_options(max_message_bytes)
            address = resolve_address(target or "")
            channel = make_channel(grpc.aio, address, credentials, options)
            self._own_channel = channel
        self._address = address
        self.home = HomeProcess(address)
        self._bearer = Bearer(credentials, address)
        weakref.finalize(self, self._bearer.close)
        self._arenas = Arenas(address, arena_bytes, self._bearer)
        weakref.finalize(self, self._arenas.close)
        self.stubs = make_stubs(channel, self._bearer)
        self.timeout_s = timeout_s
        self._fingerprint = expected_fingerprint
        self._session_ttl_s = session_ttl_s
        self._client_name = client_name
        # In place of a session that has not been opened yet, too.
        self.lease = Lease.without_session()
        self._keeper: AsyncSessionKeeper | None = None
        self._opening = AsyncOpening()
        self._open_request_id = messages.new_request_id()
        self._info: ServerInfo | None = None
        self._is_closed = False

    async def close(self) -> None:
        """End the session, with all sequences that are not freed, and the connection.

        Without a session, such sequences live on until the owner's TTL. In a process that was
        forked from the client's own, it closes nothing.
        """
        self._is_closed = True
        if not self.home.is_here:
            return
        try:
            if self.lease.is_session:
                await self._close_session()
            else:
                await self._free_lost(self.lease, self.lease.lost_requests.all(), self.timeout_s)
        finally:
            if self._own_channel is not None:
                await self._own_channel.close()
            self._arenas.close()
            self._bearer.close()

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Ask the daemon what it is. Raises FingerprintMismatchError."""
        info = await self.send(messages.server_info(self._fingerprint), timeout_s)
        self._fingerprint = info.fingerprint
        self._info = info
        self.lease.answered_by(info.boot_id)
        return info

    async def ready(self, timeout_s: float | None) -> ServerInfo:
        """The daemon's description, asked for ahead of the first call."""
        self._check_open()
        return self._info or await self.server_info(timeout_s=timeout_s)

    async def leased(self, timeout_s: float | None) -> Lease:
        """What a new sequence may live in: a session is opened if there is none that lives."""
        if self._session_ttl_s is None or (self.lease.is_session and not self.lease.is_lost):
            return self.lease
        async with self._opening.held(self.timeout_s if timeout_s is None else timeout_s):
            if not self.lease.is_session or self.lease.is_lost:
                call = session_calls.open_session(
                    self._session_ttl_s, self._client_name, self._open_request_id
                )
                self.lease = await self.send(call, timeout_s)
                self._open_request_id = messages.new_request_id()
                self._keeper = AsyncSessionKeeper(self.stubs["KeepAlive"], self.lease, self.home)
                weakref.finalize(self, self._keeper.abandon)
                await self._keeper.wait_for_first_beat()
            return self.lease

    async def attach_terms(self) -> AttachTerms:
        """For `prefixcache.attached`."""
        info = await self.ready(None)
        lease = await self.leased(None)
        lease.is_attached = True
        return AttachTerms(info, lease, self.home, self._address, self._bearer.token)

    # ---- calls

    async def call(
        self, call: Call[ResultT], timeout_s: float | None, lease: Lease | None = None
    ) -> ResultT:
        """lease: the owner of the sequences that the call is about."""
        await self.ready(timeout_s)
        with moving(call.states, lease):
            return await self.send(call, timeout_s, lease)

    async def free(
        self, lease: Lease, states: Rows[SequenceState], timeout_s: float | None
    ) -> Rows[ResultCode]:
        """End sequences of one lease: NOT_FOUND for all of them if it is a session that is lost."""
        try:
            return await self.call(sequence_calls.free(lease.owner, states), timeout_s, lease)
        except SessionLostError:
            return sequence_calls.gone(states)

    async def attend(
        self, call: AttentionCall[TensorT], timeout_s: float | None, lease: Lease
    ) -> TensorT:
        """Large tensors go by reference where the daemon takes them so, else in the message."""
        info = await self.ready(timeout_s)
        call.check_out(info.layout)
        region = await self._region(call, info)
        if region is not None:
            with suppress(ArenaLostError), region:
                by_reference = call.by_reference(region, info.layout)
                return await self.send(by_reference, timeout_s, lease)
        return await self.send(call.inline(), timeout_s, lease)

    async def send(
        self,
        call: Call[ResultT],
        timeout_s: float | None,
        lease: Lease | None = None,
        *,
        is_repeat: bool = False,
    ) -> ResultT:
        """is_repeat: with a new ticket, after the call was refused."""
        self._check_open()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if not call.goes_on:
            await self._free_lost(self.lease, self.lease.due_requests(), timeout_s)
        version = self._bearer.version
        try:
            reply = await self._reply(call, timeout_s, lease)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            is_refused = isinstance(error, UnauthenticatedError) and not is_repeat
            if is_refused and await self._renewed(version):
                return await self.send(call, timeout_s, lease, is_repeat=True)
            if lease is not None:
                error = lease.failed(error, call.request_ids)
            raise error from failure
        return call.read(reply)

    async def arena(self, info: ServerInfo) -> Arena | None:
        """Made if there is none. Not in the event loop, which it would hold up."""
        ready = self._arenas.ready
        if ready is None and self._arenas.may_have_one(info):
            ready = await asyncio.to_thread(self._arenas.prepare, info)
        return ready

    async def free_due(self, lease: Lease) -> None:
        """What calls without an answer may have made, and is to be freed by now."""
        await self._free_lost(lease, lease.due_requests(), self.timeout_s)

    # ---- inside

    async def _close_session(self) -> None:
        """What fails here the daemon does by itself: it sees the keeper's stream end."""
        if self._keeper is not None:
            await self._keeper.stop()
        if not self.lease.is_lost:
            request = session_calls.close_session(self.lease)
            with suppress(*SEND_ERRORS):
                await self.stubs["CloseSession"](
                    request, timeout=min(self.timeout_s, FREE_TIMEOUT_S)
                )

    async def _renewed(self, version: int) -> bool:
        """Whether the same call may succeed now. Not in the event loop, which it would hold up."""
        return await asyncio.to_thread(self._bearer.renew, version)

    async def _region(self, call: AttentionCall[Any], info: ServerInfo) -> Region | None:
        """For the tensors of a call, if they are worth it and there is room."""
        if call.num_bytes(info.layout) < MIN_CALL_BYTES:
            return None
        arena = await self.arena(info)
        if arena is None:
            return None
        return call.region(info.layout, arena)

    async def _free_lost(self, lease: Lease, lost: list[LostRequest], timeout_s: float) -> None:
        """What fails here is tried again ahead of a later call."""
        if not lost:
            return
        request = lease.lost_requests.free_request(lost)
        number = lease.begin(request)
        try:
            reply = await self.stubs["Free"](request, timeout=min(timeout_s, FREE_TIMEOUT_S))
        except grpc.RpcError as failure:
            lease.failed(from_rpc_error(failure))
        except SEND_ERRORS:
            return
        else:
            lease.lost_requests.answered(lost, reply)
        finally:
            lease.end(number)

    def _check_open(self) -> None:
        self.home.check()
        if self._is_closed:
            raise FailedPreconditionError("the client is closed")

    async def _reply(self, call: Call[Any], timeout_s: float, lease: Lease | None) -> Any:
        number = lease.begin(call.request) if lease is not None else 0
        sending = self.stubs[call.method](call.request, timeout=timeout_s)
        if lease is not None:
            # Not with the task: the call may go on without it.
            sending.add_done_callback(lambda _: lease.end(number))
        if not (call.goes_on or call.request_ids):
            return await sending
        # Cancelled on its way, it would leave its sequences behind in the daemon.
        reply = asyncio.ensure_future(sending)
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._give_back(call, reply, lease))
            _abandoned.add(task)
            task.add_done_callback(_abandoned.discard)
            raise

    async def _give_back(
        self, call: Call[Any], reply: asyncio.Future[Any], lease: Lease | None
    ) -> None:
        """Once the call has ended, free what it made. Ends itself with the channel or the loop."""
        with suppress(asyncio.CancelledError):
            with suppress(*SEND_ERRORS):
                await reply
            if lease is not None:
                lease.lost_requests.add(call.request_ids)
                await self._free_lost(lease, lease.due_requests(), self.timeout_s)
