"""A client's way to its daemon. `aio_connection` has its twin, which differs by await.

Owns the channel, the session, the shared memory and the sending of calls, with what follows from
a call without an answer. What is sent and what a reply means is in `messages` and `*_calls`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Rows
from contextlib import suppress
from typing import Any

import grpc

from prefixcache.address import Address
from prefixcache.client import messages, sequence_calls, session_calls
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
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.lease import Lease
from prefixcache.client.lost_requests import FREE_TIMEOUT_S, LostRequest
from prefixcache.client.messages import Call, ResultT
from prefixcache.client.opening import Opening
from prefixcache.client.results import ServerInfo
from prefixcache.client.sequence_state import SequenceState
from prefixcache.client.sequence_use import moving
from prefixcache.client.sync_keeper import SessionKeeper
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


class Connection:
    """Arguments and errors: as `Client` has them.

    lease: of new sequences, and of the client's other calls.
    """

    def __init__(
        self,
        target: str | None,
        channel: grpc.Channel | None,
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
        self._own_channel: grpc.Channel | None = None
        address: Address | None = None
        if channel is None:
            options = channel_options(max_message_bytes)
            address = resolve_address(target or "")
            channel = make_channel(grpc, address, credentials, options)
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
        self._keeper: SessionKeeper | None = None
        self._opening = Opening()
        self._open_request_id = messages.new_request_id()
        self._info: ServerInfo | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the session, with all sequences that are not freed, and the connection.

        Without a session, such sequences live on until the owner's TTL. In a process that was
        forked from the client's own, it closes nothing.
        """
        self._is_closed = True
        if not self.home.is_here:
            return
        try:
            if self.lease.is_session:
                self._close_session()
            else:
                self._free_lost(self.lease, self.lease.lost_requests.all(), self.timeout_s)
        finally:
            if self._own_channel is not None:
                self._own_channel.close()
            self._arenas.close()
            self._bearer.close()

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Ask the daemon what it is. Raises FingerprintMismatchError."""
        info = self.send(messages.server_info(self._fingerprint), timeout_s)
        self._fingerprint = info.fingerprint
        self._info = info
        self.lease.answered_by(info.boot_id)
        return info

    def ready(self, timeout_s: float | None) -> ServerInfo:
        """The daemon's description, asked for ahead of the first call."""
        self._check_open()
        return self._info or self.server_info(timeout_s=timeout_s)

    def leased(self, timeout_s: float | None) -> Lease:
        """What a new sequence may live in: a session is opened if there is none that lives."""
        if self._session_ttl_s is None or (self.lease.is_session and not self.lease.is_lost):
            return self.lease
        with self._opening.held(self.timeout_s if timeout_s is None else timeout_s):
            if not self.lease.is_session or self.lease.is_lost:
                call = session_calls.open_session(
                    self._session_ttl_s, self._client_name, self._open_request_id
                )
                self.lease = self.send(call, timeout_s)
                self._open_request_id = messages.new_request_id()
                self._keeper = SessionKeeper(self.stubs["KeepAlive"], self.lease, self.home)
                weakref.finalize(self, self._keeper.stop)
                self._keeper.wait_for_first_beat()
            return self.lease

    def attach_terms(self) -> AttachTerms:
        """For `prefixcache.attached`."""
        info = self.ready(None)
        lease = self.leased(None)
        lease.is_attached = True
        return AttachTerms(info, lease, self.home, self._address, self._bearer.token)

    # ---- calls

    def call(
        self, call: Call[ResultT], timeout_s: float | None, lease: Lease | None = None
    ) -> ResultT:
        """lease: the owner of the sequences that the call is about."""
        self.ready(timeout_s)
        with moving(call.states, lease):
            return self.send(call, timeout_s, lease)

    def free(
        self, lease: Lease, states: Rows[SequenceState], timeout_s: float | None
    ) -> Rows[ResultCode]:
        """End sequences of one lease: NOT_FOUND for all of them if it is a session that is lost."""
        try:
            return self.call(sequence_calls.free(lease.owner, states), timeout_s, lease)
        except SessionLostError:
            return sequence_calls.gone(states)

    def attend(
        self, call: AttentionCall[TensorT], timeout_s: float | None, lease: Lease
    ) -> TensorT:
        """Large tensors go by reference where the daemon takes them so, else in the message."""
        info = self.ready(timeout_s)
        call.check_out(info.layout)
        region = self._region(call, info)
        if region is not None:
            with suppress(ArenaLostError), region:
                by_reference = call.by_reference(region, info.layout)
                return self.send(by_reference, timeout_s, lease)
        return self.send(call.inline(), timeout_s, lease)

    def send(
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
            self._free_lost(self.lease, self.lease.due_requests(), timeout_s)
        version = self._bearer.version
        try:
            reply = self._reply(call, timeout_s, lease)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            is_refused = isinstance(error, UnauthenticatedError) and not is_repeat
            if is_refused and self._renewed(version):
                return self.send(call, timeout_s, lease, is_repeat=True)
            if lease is not None:
                error = lease.failed(error, call.request_ids)
            raise error from failure
        return call.read(reply)

    def arena(self, info: ServerInfo) -> Arena | None:
        """Made if there is none."""
        ready = self._arenas.ready
        if ready is None and self._arenas.may_have_one(info):
            ready = self._arenas.prepare(info)
        return ready

    def free_due(self, lease: Lease) -> None:
        """What calls without an answer may have made, and is to be freed by now."""
        self._free_lost(lease, lease.due_requests(), self.timeout_s)

    # ---- inside

    def _close_session(self) -> None:
        """What fails here the daemon does by itself: it sees the keeper's stream end."""
        if self._keeper is not None:
            self._keeper.stop()
        if not self.lease.is_lost:
            request = session_calls.close_session(self.lease)
            with suppress(*SEND_ERRORS):
                self.stubs["CloseSession"](request, timeout=min(self.timeout_s, FREE_TIMEOUT_S))

    def _renewed(self, version: int) -> bool:
        """Whether the same call may succeed now."""
        return self._bearer.renew(version)

    def _region(self, call: AttentionCall[Any], info: ServerInfo) -> Region | None:
        """For the tensors of a call, if they are worth it and there is room."""
        if call.num_bytes(info.layout) < MIN_CALL_BYTES:
            return None
        arena = self.arena(info)
        if arena is None:
            return None
        return call.region(info.layout, arena)

    def _free_lost(self, lease: Lease, lost: list[LostRequest], timeout_s: float) -> None:
        """What fails here is tried again ahead of a later call."""
        if not lost:
            return
        request = lease.lost_requests.free_request(lost)
        number = lease.begin(request)
        try:
            reply = self.stubs["Free"](request, timeout=min(timeout_s, FREE_TIMEOUT_S))
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

    def _reply(self, call: Call[Any], timeout_s: float, lease: Lease | None) -> Any:
        send = self.stubs[call.method]
        if lease is None:
            return send(call.request, timeout=timeout_s)
        number = lease.begin(call.request)
        try:
            return send(call.request, timeout=timeout_s)
        finally:
            lease.end(number)
