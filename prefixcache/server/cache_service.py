"""PrefixCacheService: check, convert, one call of the core under its lock, reply.

Requests are twins (see `prefixcache.rpc.wire`). Hashing a prompt happens before the lock is taken.
Safe to call from many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import grpc

from prefixcache.core.sequence import CommitRow
from prefixcache.errors import (
    DrainingError,
    FingerprintMismatchError,
    InvalidArgumentError,
    PrefixCacheError,
)
from prefixcache.rpc._pb import cache_pb2
from prefixcache.rpc.plain import plain_reply
from prefixcache.rpc.status import status_message
from prefixcache.rpc.wire import (
    column32,
    column64,
    read_column32,
    read_column64,
    repeated_bytes,
    twin,
)
from prefixcache.server import checks
from prefixcache.server.allocation import Allocation
from prefixcache.server.callers import Caller
from prefixcache.server.daemon import REPLY_HEADROOM_BYTES, Daemon
from prefixcache.server.pending_waits import PendingWaits

_AllocateResponse = plain_reply(cache_pb2.AllocateResponse)
_AppendResponse = plain_reply(cache_pb2.AppendResponse)
_CommitResponse = plain_reply(cache_pb2.CommitResponse)
_FreeResponse = plain_reply(cache_pb2.FreeResponse)
_LookupResponse = plain_reply(cache_pb2.LookupResponse)


class CacheService:
    """waits: None if no Allocate may wait."""

    def __init__(self, daemon: Daemon, waits: PendingWaits | None = None) -> None:
        self._daemon = daemon
        self._waits = waits
        self._sequences = daemon.sequences
        self._block_size = daemon.sequences.pool.block_size
        self._max_tokens = daemon.info.limits.max_tokens_per_call
        self._max_rows = daemon.info.limits.max_rows_per_call
        self._max_wait_s = daemon.info.limits.max_wait_pending_s
        self._fingerprint = daemon.info.layout_fingerprint

    def get_server_info(
        self, request: cache_pb2.GetServerInfoRequest, caller: Caller
    ) -> cache_pb2.GetServerInfoResponse:
        self._check_fingerprint(request.expected_fingerprint)
        return self._daemon.info

    def lookup(self, request: Any, caller: Caller) -> Any:
        token_ids, extra_keys = checks.prompt_with_lookahead(
            request, caller, self._block_size, self._max_tokens
        )
        full_hit = checks.full_hit(request.full_hit)
        prompt = self._sequences.prepare(token_ids, extra_keys)
        with self._sequences.lock:
            found = self._sequences.lookup(
                prompt, request.num_lookahead_tokens, full_hit, self._account_of(caller)
            )
        chain = prompt.chain if request.want_hashes else None
        # Hashes are the one thing in a reply that is not plain.
        response = _LookupResponse if chain is None else cache_pb2.LookupResponse
        reply = response(
            num_cached_tokens=found.num_cached_tokens,
            num_cached_blocks=found.num_cached_blocks,
            num_blocks_needed=found.num_blocks_needed,
            num_blocks_free=found.num_blocks_free,
            num_pending_tokens=found.num_pending_tokens,
        )
        if chain is not None:
            hashes = chain.hashes
            reply.MergeFromString(
                repeated_bytes(reply.BLOCK_HASHES_FIELD_NUMBER, hashes.data, hashes.digest_bytes)
            )
        return reply

    def allocate(
        self,
        request: Any,
        caller: Caller,
        context: grpc.ServicerContext | None = None,
    ) -> Any:
        """context: of the call, if it is one by itself: a part of a step may not wait."""
        wait_s = checks.wait_pending_s(request.wait_pending_ms, self._max_wait_s)
        if wait_s and context is None:
            raise InvalidArgumentError("wait_pending_ms", "must be 0 in a step, which never waits")
        allocation = self._allocation(request, caller)
        if wait_s and context is not None and self._waits is not None:
            allocated = self._waits.allocate(allocation, wait_s, caller.tenant, context)
        else:
            with self._sequences.lock:
                allocated = allocation.apply()
        sequence_id, num_cached_tokens, num_cached_blocks, block_ids, num_pending = allocated
        return _AllocateResponse(
            sequence_id=sequence_id,
            num_cached_tokens=num_cached_tokens,
            num_cached_blocks=num_cached_blocks,
            block_ids=column32(block_ids),
            num_pending_tokens=num_pending,
        )

    def _allocation(self, request: Any, caller: Caller) -> Allocation:
        owner = checks.owner(request.owner, caller)
        order = checks.order(request)
        request_id = checks.request_id(request.request_id)
        token_ids, extra_keys = checks.prompt_with_lookahead(
            request, caller, self._block_size, self._max_tokens
        )
        cache_use = checks.cache_use(request.cache_use)
        full_hit = checks.full_hit(request.full_hit)
        self._check_fingerprint(request.layout_fingerprint)
        self._check_not_draining()
        return Allocation(
            self._daemon,
            owner,
            order,
            request_id,
            self._sequences.prepare(token_ids, extra_keys),
            request.num_lookahead_tokens,
            cache_use,
            full_hit,
            request.resumed,
            self._account_of(caller),
        )

    def append(self, request: Any, caller: Caller) -> Any:
        owner = checks.owner(request.owner, caller)
        order = checks.order(request)
        batch = checks.append_batch(request, self._block_size, self._max_tokens, self._max_rows)
        if self._daemon.engine is not None:
            appended = self._daemon.engine.append(owner, batch, order, self._account_of(caller))
        else:
            with self._sequences.lock:
                self._sequences.live.take_turn(owner, order)
                appended = self._sequences.rows.append(owner, batch, self._account_of(caller))
        return _AppendResponse(
            result_codes=column32(appended.result_codes),
            num_new_blocks=column32(appended.num_new_blocks),
            new_block_ids=column32(appended.new_block_ids),
            num_copies=column32(appended.num_copies),
            copy_sources=column32(appended.copy_sources),
            copy_destinations=column32(appended.copy_destinations),
            num_blocks_free=appended.num_blocks_free,
        )

    def commit(self, request: Any, caller: Caller) -> Any:
        owner = checks.owner(request.owner, caller)
        order = checks.order(request)
        columns = checks.rows(request, "start_positions", "num_computed_tokens", self._max_rows)
        rows = list(map(CommitRow._make, zip(*columns.lists(), strict=True)))
        with self._sequences.lock:
            self._sequences.live.take_turn(owner, order)
            if self._daemon.engine is not None:
                self._sequences.live.sessions.check_writes_itself(owner)
            results = self._sequences.rows.commit(owner, rows)
        return _CommitResponse(
            result_codes=column32([result.code for result in results]),
            num_cached_blocks=column32([result.num_cached_blocks for result in results]),
        )

    def fork(self, request: cache_pb2.ForkRequest, caller: Caller) -> Any:
        owner = checks.owner(request.owner, caller)
        order = checks.order(request)
        request_ids = [checks.request_id(r, "request_ids") for r in request.request_ids]
        limit = self._daemon.info.limits.max_fork_children
        if not 1 <= len(request_ids) <= limit:
            raise InvalidArgumentError(
                "request_ids", f"has {len(request_ids)} entries, must have 1 to {limit}"
            )
        if any(request_ids) and len(set(request_ids) - {""}) < len(request_ids):
            raise InvalidArgumentError("request_ids", "must all be empty, or all be different")
        self._check_not_draining()
        with self._sequences.lock:
            self._sequences.live.take_turn(owner, order)
            children = self._sequences.fork(
                owner, request.sequence_id, request.num_tokens, request_ids
            )
        return twin("ForkResponse")(sequence_ids=column64(children))

    def truncate(self, request: cache_pb2.TruncateRequest, caller: Caller) -> Any:
        owner = checks.owner(request.owner, caller)
        order = checks.order(request)
        with self._sequences.lock:
            self._sequences.live.take_turn(owner, order)
            dropped = self._sequences.truncate(
                owner, request.sequence_id, request.num_tokens_before, request.num_tokens_after
            )
        return twin("TruncateResponse")(dropped_block_ids=column32(dropped))

    def free(self, request: Any, caller: Caller) -> Any:
        owner = checks.owner(request.owner, caller)
        order = checks.order(request)
        sequence_ids = read_column64(request.sequence_ids)
        num_rows = checks.row_count(len(sequence_ids), "sequence_ids", self._max_rows)
        checks.row_count(num_rows + len(request.request_ids), "request_ids", self._max_rows)
        request_ids = checks.request_names(request.request_ids)
        with self._sequences.lock:
            self._sequences.live.take_turn(owner, order)
            codes = self._sequences.free(owner, sequence_ids.tolist(), request_ids)
        return _FreeResponse(result_codes=column32(codes))

    def open_step(
        self, cancel: Callable[[], object], caller: Caller
    ) -> AbstractContextManager[Callable[[Any], Any]]:
        return nullcontext(partial(self.step, caller=caller))

    def step(self, request: Any, caller: Caller) -> Any:
        limit = self._daemon.info.limits.max_step_allocates
        if len(request.allocates) > limit:
            raise InvalidArgumentError(
                "allocates", f"has {len(request.allocates)} entries, must have at most {limit}"
            )
        response = twin("StepResponse")()
        for name, call in (("free", self.free), ("commit", self.commit), ("append", self.append)):
            if request.HasField(name):
                part = getattr(request, name)
                reply = self._part(response, name, 0, partial(call, caller=caller), part)
                if reply is not None:
                    getattr(response, name).MergeFromString(reply.SerializeToString())
        num_bytes = response.ByteSize()
        for index, part in enumerate(request.allocates):
            call = partial(self._allocate_in_step, caller=caller, num_bytes=num_bytes)
            reply = self._part(response, "allocates", index, call, part)
            data = b"" if reply is None else reply.SerializeToString()
            response.allocates.add().MergeFromString(data)
            num_bytes += len(data)
        return response

    def _allocate_in_step(self, request: Any, caller: Caller, num_bytes: int) -> Any:
        """num_bytes: of the answer so far. What cannot be sent would be lost to its caller."""
        num_slots = len(read_column32(request.token_ids)) + request.num_lookahead_tokens
        num_blocks = min(-(-num_slots // self._block_size), self._sequences.pool.num_blocks)
        limit = self._daemon.info.limits.max_message_bytes
        if num_bytes + 4 * num_blocks + REPLY_HEADROOM_BYTES > limit:
            raise InvalidArgumentError(
                "allocates", f"its {num_blocks} block ids do not fit into the step's answer too"
            )
        return self.allocate(request, caller)

    def _part(
        self, response: Any, name: str, index: int, call: Callable[[Any], Any], request: Any
    ) -> Any:
        """The reply of one call of a step; None if it was refused, which `response` then says."""
        try:
            return call(request)
        except PrefixCacheError as error:
            status = status_message(error, self._daemon.boot_id).SerializeToString()
            response.errors.add(call=name, index=index, status=status)
            return None

    def _account_of(self, caller: Caller) -> int:
        return self._sequences.tenants.account_of(caller.tenant, caller.namespace)

    def _check_fingerprint(self, given: bytes) -> None:
        if given and given != self._fingerprint:
            raise FingerprintMismatchError(given, self._fingerprint)

    def _check_not_draining(self) -> None:
        if self._daemon.is_draining:
            raise DrainingError
