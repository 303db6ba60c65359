"""Calls that stand alone: Python arguments -> twin request, twin reply -> result. No I/O.

A `Call` is all that a client needs for one RPC; the sync and the async client only differ in how
they send it. Calls on sequences are in `*_calls`. Pure functions; a bad argument is an
InvalidArgumentError before anything is sent, what only the daemon can judge is left to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy.typing as npt

from prefixcache.client.columns import uint32, uint32_column
from prefixcache.client.prompt_request import PromptRequest
from prefixcache.client.results import SequenceInfo, SequencePage, ServerInfo
from prefixcache.core.stats import CallStats, PoolStats, TenantStats
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc.codec import extra_keys_to_wire, layout_from_wire
from prefixcache.rpc.wire import twin
from prefixcache.types import (
    CacheUse,
    Explanation,
    ExtraKeys,
    FullHit,
    KeyDifference,
    KeyKind,
    LookupResult,
    MissReason,
    SequenceId,
    SequenceOrder,
)

if TYPE_CHECKING:
    from prefixcache.client.sequence_state import SequenceState

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Call(Generic[ResultT]):
    """One RPC: its name, its request, and what becomes of the reply, a twin.

    request: a twin, or a `PromptRequest`.

    `read` is called once, with the reply of a call that succeeded; it may advance the sequences
    that the call is about.

    request_ids: retry keys that the client made up for it. If no reply comes they are all that
    names the sequences that it may have made, so what they name is freed.
    goes_on: it is neither held up nor cancelled with the task that made it.
    states: sequences that it may take blocks from; see `sequence_use`.
    """

    method: str
    request: Any
    read: Callable[[Any], ResultT]
    request_ids: tuple[str, ...] = ()
    goes_on: bool = False
    states: Sequence[SequenceState] = ()


def new_owner() -> bytes:
    """The key to a client's sequences: 16 random bytes."""
    return secrets.token_bytes(16)


def new_request_id() -> str:
    """A retry key that no other request has."""
    return secrets.token_hex(16)


def server_info(expected_fingerprint: bytes | None) -> Call[ServerInfo]:
    request = twin("GetServerInfoRequest")(expected_fingerprint=expected_fingerprint or b"")
    return Call("GetServerInfo", request, _read_server_info)


def _read_server_info(reply: Any) -> ServerInfo:
    layout = None
    if reply.HasField("layout"):
        layout = layout_from_wire(reply.layout, reply.block_size)
    return ServerInfo(
        api_version=reply.api_version,
        version=reply.server_version,
        boot_id=reply.boot_id,
        layout=layout,
        fingerprint=reply.layout_fingerprint,
        num_blocks=reply.num_blocks,
        block_size=reply.block_size,
        device=reply.device,
        hash_algorithm=reply.hash_algorithm,
        hash_recipe_version=reply.hash_recipe_version,
        hash_seeded=reply.hash_seeded,
        none_hash_digest=reply.none_hash_digest,
        verify_hits=reply.verify_hits,
        prefix_caching=reply.prefix_caching,
        max_message_bytes=reply.limits.max_message_bytes,
        max_fork_children=reply.limits.max_fork_children,
        max_step_allocates=reply.limits.max_step_allocates,
        capabilities=tuple(reply.capabilities),
        model_name=reply.model_name,
        model_revision=reply.model_revision,
        owner_ttl_s=reply.owner_ttl_s,
        max_sessions=reply.limits.max_sessions,
        max_session_ttl_s=reply.limits.max_session_ttl_s,
        max_sequences_per_session=reply.limits.max_sequences_per_session,
        reconnect_grace_s=reply.limits.reconnect_grace_s,
        max_tokens_per_call=reply.limits.max_tokens_per_call,
        max_queued_calls=reply.limits.max_queued_calls,
        max_queue_wait_s=reply.limits.max_queue_wait_s,
        max_owners=reply.limits.max_owners,
        max_connections=reply.limits.max_connections,
        max_streams_per_connection=reply.limits.max_streams_per_connection,
        max_step_streams=reply.limits.max_step_streams,
        max_wait_pending_s=reply.limits.max_wait_pending_s,
        max_pending_waits=reply.limits.max_pending_waits,
        max_rows_per_call=reply.limits.max_rows_per_call,
        max_fields_per_request=reply.limits.max_fields_per_request,
        max_arena_bytes=reply.limits.max_arena_bytes,
        core=reply.core,
    )


def lookup(
    tokens: npt.ArrayLike,
    extra_keys: ExtraKeys | None,
    num_lookahead_tokens: int,
    full_hit: FullHit,
    want_hashes: bool,
) -> Call[LookupResult]:
    request = PromptRequest(
        "LookupRequest",
        uint32_column(tokens, "token_ids"),
        extra_keys=extra_keys_message(extra_keys),
        num_lookahead_tokens=uint32(num_lookahead_tokens, "num_lookahead_tokens"),
        full_hit=full_hit,
        want_hashes=want_hashes,
    )
    return Call("Lookup", request, _read_lookup)


def _read_lookup(reply: Any) -> LookupResult:
    return LookupResult(
        num_cached_tokens=reply.num_cached_tokens,
        num_cached_blocks=reply.num_cached_blocks,
        num_blocks_needed=reply.num_blocks_needed,
        num_blocks_free=reply.num_blocks_free,
        block_hashes=tuple(reply.block_hashes),
        num_pending_tokens=reply.num_pending_tokens,
    )


def explain(
    tokens: npt.ArrayLike,
    extra_keys: ExtraKeys | None,
    full_hit: FullHit,
    cache_use: CacheUse,
    tenant: str,
) -> Call[Explanation]:
    request = PromptRequest(
        "ExplainRequest",
        uint32_column(tokens, "token_ids"),
        extra_keys=extra_keys_message(extra_keys),
        full_hit=full_hit,
        cache_use=cache_use,
        tenant=tenant,
    )
    return Call("Explain", request, _read_explanation)


def _read_explanation(reply: Any) -> Explanation:
    divergence = reply.divergence
    has_token = divergence.HasField("first_different_token")
    return Explanation(
        num_cached_tokens=reply.num_cached_tokens,
        num_cached_blocks=reply.num_cached_blocks,
        num_pending_tokens=reply.num_pending_tokens,
        reason=MissReason(reply.reason),
        block_hash=reply.block_hash,
        age_s=reply.age_s if reply.HasField("age_s") else None,
        first_different_token=divergence.first_different_token if has_token else None,
        key_differences=tuple(
            KeyDifference(KeyKind(key.kind), key.in_prompt, key.in_cache)
            for key in divergence.key_differences
        ),
        keeps_content=reply.keeps_content,
    )


def stats() -> Call[PoolStats]:
    return Call("GetStats", twin("GetStatsRequest")(), _read_stats)


def _read_stats(reply: Any) -> PoolStats:
    counts = {field.name: getattr(reply, field.name) for field in fields(PoolStats)}
    tenants = tuple(map(_read_tenant, reply.tenants))
    return PoolStats(
        **{**counts, "tenants": tenants, "calls": tuple(map(_read_calls, reply.calls))}
    )


def _read_tenant(message: Any) -> TenantStats:
    counts = {field.name: getattr(message, field.name) for field in fields(TenantStats)}
    limit = message.max_blocks if message.HasField("max_blocks") else None
    return TenantStats(**{**counts, "max_blocks": limit})


def _read_calls(message: Any) -> CallStats:
    return CallStats(**{field.name: getattr(message, field.name) for field in fields(CallStats)})


def reset_cache(force: bool) -> Call[int]:
    request = twin("ResetCacheRequest")(force=force)
    return Call("ResetCache", request, lambda reply: int(reply.num_dropped))


def list_sequences(page_token: str) -> Call[SequencePage]:
    """The page after the one that gave `page_token`; the first for an empty one."""
    request = twin("ListSequencesRequest")(page_size=1000, page_token=page_token)
    return Call("ListSequences", request, _read_page)


def first_sequences(order: SequenceOrder, count: int) -> Call[SequencePage]:
    """count: of the page, 1 to 1000."""
    request = twin("ListSequencesRequest")(page_size=uint32(count, "count"), order=order)
    return Call("ListSequences", request, _read_page)


def _read_page(reply: Any) -> SequencePage:
    return SequencePage(
        sequences=tuple(
            SequenceInfo(
                sequence_id=SequenceId(info.sequence_id),
                owner_digest=info.owner_digest,
                num_tokens=info.num_tokens,
                num_computed_tokens=info.num_computed_tokens,
                num_cached_tokens=info.num_cached_tokens,
                num_blocks=info.num_blocks,
                age_s=info.age_s,
                client_name=info.client_name,
                tenant=info.tenant,
            )
            for info in reply.sequences
        ),
        next_page_token=reply.next_page_token,
    )


def extra_keys_message(extra_keys: ExtraKeys | None) -> Any:
    """The field's message, or None for none."""
    if not extra_keys:
        return None
    try:
        return extra_keys_to_wire(extra_keys)
    except (ValueError, TypeError) as error:
        # An offset below 0, text that is no Unicode, bytes in place of text.
        raise InvalidArgumentError("extra_keys", str(error)) from error
