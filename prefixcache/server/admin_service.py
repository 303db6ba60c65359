"""AdminService: what operators ask."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from prefixcache.core.sessions import owner_digest
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import admin_pb2
from prefixcache.rpc.wire import twin
from prefixcache.server import checks
from prefixcache.server.access import Access
from prefixcache.server.call_counts import CallCounts
from prefixcache.server.callers import Caller
from prefixcache.server.daemon import Daemon
from prefixcache.server.event_streams import EventStreams
from prefixcache.server.read_stats import read_stats
from prefixcache.types import MissReason, SequenceOrder

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_PAGE_TOKEN = re.compile("[0-9]{1,20}")


class AdminService:
    """call_counts: by the RPC's name. access: says which tenants there are."""

    def __init__(
        self,
        daemon: Daemon,
        call_counts: Mapping[str, CallCounts],
        event_streams: EventStreams,
        access: Access,
    ) -> None:
        self._daemon = daemon
        self._call_counts = call_counts
        self._event_streams = event_streams
        self._access = access
        self._sequences = daemon.sequences

    def get_stats(
        self, request: admin_pb2.GetStatsRequest, caller: Caller
    ) -> admin_pb2.GetStatsResponse:
        stats = read_stats(self._daemon, self._call_counts)
        return admin_pb2.GetStatsResponse(**dataclasses.asdict(stats))

    def reset_cache(
        self, request: admin_pb2.ResetCacheRequest, caller: Caller
    ) -> admin_pb2.ResetCacheResponse:
        with self._sequences.lock:
            num_dropped = self._sequences.reset(force=request.force)
        return admin_pb2.ResetCacheResponse(num_dropped=num_dropped)

    def list_sequences(
        self, request: admin_pb2.ListSequencesRequest, caller: Caller
    ) -> admin_pb2.ListSequencesResponse:
        after, page_size = _page(request)
        order = _order(request)
        with self._sequences.lock:
            if order is SequenceOrder.OLDEST:
                page = self._sequences.listings.sequences_after(after, page_size + 1)
            else:
                page = self._sequences.listings.first_sequences(order, page_size)
            tenants = {
                account: self._sequences.tenants.name_of(account)
                for account in {info.account for info in page}
            }
        shown = page[:page_size]
        return admin_pb2.ListSequencesResponse(
            sequences=[
                admin_pb2.SequenceInfo(
                    sequence_id=info.sequence_id,
                    owner_digest=owner_digest(info.owner),
                    num_tokens=info.num_tokens,
                    num_computed_tokens=info.num_computed_tokens,
                    num_cached_tokens=info.num_cached_tokens,
                    num_blocks=info.num_blocks,
                    age_s=info.age_s,
                    client_name=info.client_name,
                    tenant=tenants[info.account],
                )
                for info in shown
            ],
            next_page_token=str(shown[-1].serial) if len(page) > page_size else "",
        )

    def list_sessions(
        self, request: admin_pb2.ListSessionsRequest, caller: Caller
    ) -> admin_pb2.ListSessionsResponse:
        after, page_size = _page(request)
        with self._sequences.lock:
            page = self._sequences.listings.sessions_after(after, page_size + 1)
        shown = page[:page_size]
        return admin_pb2.ListSessionsResponse(
            sessions=[
                admin_pb2.SessionInfo(
                    owner_digest=info.digest,
                    client_name=info.client_name,
                    tenant=info.tenant,
                    ttl_s=info.ttl_s,
                    left_s=info.left_s,
                    is_connected=info.is_connected,
                    num_sequences=info.num_sequences,
                    age_s=info.age_s,
                )
                for info in shown
            ],
            next_page_token=str(shown[-1].serial) if len(page) > page_size else "",
        )

    def explain(self, request: Any, caller: Caller) -> Any:
        if request.tenant:
            caller = self._access.for_tenant(caller, request.tenant)
        token_ids, extra_keys = checks.prompt(
            request,
            caller,
            self._sequences.pool.block_size,
            self._daemon.info.limits.max_tokens_per_call,
        )
        full_hit, cache_use = checks.full_hit(request.full_hit), checks.cache_use(request.cache_use)
        prompt = self._sequences.prepare(token_ids, extra_keys)
        account = self._sequences.tenants.account_of(caller.tenant, caller.namespace)
        with self._sequences.lock:
            found = self._sequences.explain(prompt, full_hit, cache_use, account)
        divergence = None
        if found.reason is MissReason.DIVERGED:
            divergence = twin("Divergence")(
                first_different_token=found.first_different_token,
                key_differences=[
                    twin("KeyDifference")(
                        kind=key.kind, in_prompt=key.in_prompt, in_cache=key.in_cache
                    )
                    for key in found.key_differences
                ],
            )
        return twin("ExplainResponse")(
            num_cached_tokens=found.num_cached_tokens,
            num_cached_blocks=found.num_cached_blocks,
            num_pending_tokens=found.num_pending_tokens,
            reason=found.reason,
            block_hash=found.block_hash,
            age_s=found.age_s,
            divergence=divergence,
            keeps_content=found.keeps_content,
        )

    def watch_events(
        self, request: admin_pb2.WatchEventsRequest, caller: Caller, context: grpc.ServicerContext
    ) -> Iterator[Any]:
        return self._event_streams.watch(request, context)


def _page(
    request: admin_pb2.ListSequencesRequest | admin_pb2.ListSessionsRequest,
) -> tuple[int, int]:
    """The serial that the page comes after, and how many entries it may have."""
    page_size = request.page_size or DEFAULT_PAGE_SIZE
    if page_size > MAX_PAGE_SIZE:
        raise InvalidArgumentError("page_size", f"is {page_size}, at most {MAX_PAGE_SIZE}")
    if request.page_token and not _PAGE_TOKEN.fullmatch(request.page_token):
        raise InvalidArgumentError("page_token", "is not from a reply of this call")
    return int(request.page_token or 0), page_size


def _order(request: admin_pb2.ListSequencesRequest) -> SequenceOrder:
    try:
        order = SequenceOrder(request.order)
    except ValueError:
        raise InvalidArgumentError("order", f"{request.order} is none") from None
    if request.page_token and order is not SequenceOrder.OLDEST:
        raise InvalidArgumentError("page_token", "is for the oldest first; other orders have none")
    return order
