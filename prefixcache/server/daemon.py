"""One daemon's parts: block manager, K/V memory, and what GetServerInfo says of them.

Constructors below take plain values; configuration is the life cycle's business. torch is
imported only if there is K/V storage.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixcache import __version__
from prefixcache.core.events import MAX_EVENT_BYTES, EventLog
from prefixcache.core.form import FORM
from prefixcache.core.hashing import HASH_ALGORITHMS, HASH_RECIPE_VERSION, Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import Prompt
from prefixcache.core.sequences import Sequences
from prefixcache.core.sessions import SessionLimits
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import cache_pb2
from prefixcache.rpc.codec import layout_to_wire
from prefixcache.server.access import Access
from prefixcache.server.arenas import Arenas
from prefixcache.server.attachments import Attachments
from prefixcache.server.shared_pool import SharedPool
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.layout import Layout, fingerprint
from prefixcache.types import CacheUse, PoolAccess

if TYPE_CHECKING:
    from prefixcache.engine import Engine

API_VERSION = "v1"
MAX_STREAMS_PER_CONNECTION = 1024
MAX_STEP_ALLOCATES = 1024
"""New sequences in one step: a refused one takes a few bytes to ask for and many to answer."""
MIN_ROWS_PER_CALL = 2**16
"""Rows of a batch are of different sequences, and an owner has so many at most, or its limit."""
FIELDS_PER_REQUEST = 2**16
"""And one for each block that a prompt may have, since each may have an embeddings' digest."""
REPLY_HEADROOM_BYTES = 1024
"""What a reply may hold beside block ids."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How blocks are hashed and kept. `verify_hits` None: on for digests that can collide.

    event_buffer_bytes: of the last events, which WatchEvents tells; 0 for none.
    """

    num_blocks: int
    block_size: int = 16
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str | None = None
    verify_hits: bool | None = None
    prefix_caching: bool = True
    owner_ttl_s: float = 600.0
    event_buffer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Whose K/V the pool holds. `layout` None: none, the clients own their memory.

    scales: of a layout that is quantised with one scale a tensor, else None.
    """

    layout: Layout | None = None
    device: str = "cpu"
    name: str = ""
    revision: str = ""
    scales: FixedScales | None = None


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """max_queued_calls, max_queue_wait_s: of calls that wait for a thread.

    max_step_streams: open at the same time; an engine needs one.
    max_arena_bytes, max_total_arena_bytes, max_user_arena_bytes: of memory that a client shares,
    that all do, and all of one user of the host.
    """

    max_message_bytes: int = 256 * 2**20
    max_fork_children: int = 256
    max_tokens_per_call: int = 2**22
    max_queued_calls: int = 1024
    max_queue_wait_s: float = 60.0
    max_connections: int = 1024
    max_step_streams: int = 256
    max_wait_pending_s: float = 60.0
    max_pending_waits: int = 256
    max_arena_bytes: int = 2**30
    max_total_arena_bytes: int = 2**32
    max_user_arena_bytes: int = 3 * 2**30


class Daemon:
    """Everything that the servicers need. `is_draining` refuses new sequences.

    on_allocated: see `Sequences`. around_kernels: see `Engine`.

    Raises InvalidArgumentError if a reply with all block ids is larger than a message may be: a
    reply that cannot be sent would leave its caller with blocks that it does not know of.
    """

    def __init__(
        self,
        cache: CacheOptions,
        model: ModelOptions | None = None,
        limits: LimitOptions | None = None,
        session_limits: SessionLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_allocated: Callable[[Prompt, CacheUse, bool], None] | None = None,
        around_kernels: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        model, limits = model or ModelOptions(), limits or LimitOptions()
        session_limits = session_limits or SessionLimits()
        largest_reply = 4 * cache.num_blocks + REPLY_HEADROOM_BYTES
        if limits.max_message_bytes < largest_reply:
            raise InvalidArgumentError(
                "max_message_bytes",
                f"is {limits.max_message_bytes}, and a reply with the ids of all "
                f"{cache.num_blocks} blocks takes {largest_reply}",
            )
        algorithm = HASH_ALGORITHMS[cache.hash_algorithm]
        verify = not algorithm.is_cryptographic if cache.verify_hits is None else cache.verify_hits
        hasher = Hasher(algorithm, cache.hash_seed, cache.block_size, in_background=True)
        self.boot_id = secrets.token_bytes(16)
        self.is_draining = False
        self.attachments: Attachments | None = None
        self._shared_pool: SharedPool | None = None
        self.clock = clock
        self._started_s = clock()
        events = None
        if cache.event_buffer_bytes:
            # A snapshot's message may have two of them.
            largest_event = min(MAX_EVENT_BYTES, limits.max_message_bytes // 4)
            events = EventLog(cache.event_buffer_bytes, max_event_bytes=largest_event)
        self.sequences = Sequences(
            Pool(
                cache.num_blocks,
                cache.block_size,
                verify,
                algorithm.digest_bytes,
                events,
                clock=clock,
            ),
            hasher,
            num_layers=model.layout.num_layers if model.layout else 1,
            caching=cache.prefix_caching,
            owner_ttl_s=cache.owner_ttl_s,
            session_limits=session_limits,
            clock=clock,
            on_allocated=on_allocated,
        )
        self.engine = self._make_engine(model, cache.num_blocks, around_kernels)
        # Only tensors go there.
        arena_limits = (
            limits.max_arena_bytes,
            limits.max_total_arena_bytes,
            limits.max_user_arena_bytes,
        )
        self.arenas = Arenas(*(arena_limits if model.layout else (0, 0, 0)))
        limits_message = _limits_message(limits, session_limits, cache.block_size)
        limits_message.max_arena_bytes = self.arenas.max_bytes
        self.info = self._make_info(cache, model, limits_message, verify)

    def share_memory(self, access: Access, limit: PoolAccess) -> Attachments | None:
        """Let processes attach, as far as the limit goes; None without K/V memory, or without."""
        if self.engine is None or limit is PoolAccess.NONE:
            return None
        self._shared_pool = SharedPool(self.engine.memory, self.info)
        self.attachments = Attachments(self.sequences, self._shared_pool, access, limit)
        self.info.capabilities.append("attach")
        if limit is PoolAccess.WRITE:
            self.info.capabilities.append("attach_write")
        return self.attachments

    def lost_writers(self) -> list[str]:
        """`Attachments.lost_writers`."""
        return self.attachments.lost_writers() if self.attachments is not None else []

    def num_attached(self, access: PoolAccess) -> int:
        """Attachments to the memory, for reading or for writing."""
        return self.attachments.count(access) if self.attachments is not None else 0

    def uptime_s(self) -> float:
        return self.clock() - self._started_s

    def close(self) -> None:
        """Give the K/V memory back. No call may be running."""
        if self._shared_pool is not None:
            self._shared_pool.close()
        if self.engine is not None:
            self.engine.memory.close()

    def _make_engine(
        self,
        model: ModelOptions,
        num_blocks: int,
        around_kernels: Callable[[], AbstractContextManager[object]],
    ) -> Engine | None:
        if model.layout is None:
            return None
        from prefixcache.engine import Engine
        from prefixcache.storage.pool_memory import PoolMemory

        memory = PoolMemory(model.layout, num_blocks, model.device, model.scales)
        return Engine(self.sequences, memory, around_kernels)

    def _make_info(
        self, cache: CacheOptions, model: ModelOptions, limits: cache_pb2.Limits, verify: bool
    ) -> cache_pb2.GetServerInfoResponse:
        layout, hasher = model.layout, self.sequences.hasher
        return cache_pb2.GetServerInfoResponse(
            api_version=API_VERSION,
            server_version=__version__,
            boot_id=self.boot_id,
            layout=layout_to_wire(layout) if layout else None,
            layout_fingerprint=fingerprint(
                layout,
                block_size=cache.block_size,
                model_name=model.name,
                model_revision=model.revision,
                hash_algorithm=cache.hash_algorithm,
            ),
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            device=model.device if layout else "none",
            hash_algorithm=cache.hash_algorithm,
            hash_recipe_version=HASH_RECIPE_VERSION,
            hash_seeded=hasher.is_seeded,
            none_hash_digest=hashlib.sha256(hasher.none_hash).digest(),
            verify_hits=verify,
            prefix_caching=cache.prefix_caching,
            limits=limits,
            capabilities=[
                "attention" if layout else "commit",
                *(["events"] if cache.event_buffer_bytes else []),
                *(["arenas"] if limits.max_arena_bytes else []),
            ],
            model_name=model.name,
            model_revision=model.revision,
            owner_ttl_s=cache.owner_ttl_s,
            core=FORM,
        )


def _limits_message(
    limits: LimitOptions, sessions: SessionLimits, block_size: int
) -> cache_pb2.Limits:
    return cache_pb2.Limits(
        max_message_bytes=limits.max_message_bytes,
        max_fork_children=limits.max_fork_children,
        max_step_allocates=MAX_STEP_ALLOCATES,
        max_sessions=sessions.max_sessions,
        max_session_ttl_s=sessions.max_ttl_s,
        max_sequences_per_session=sessions.max_sequences,
        reconnect_grace_s=sessions.reconnect_grace_s,
        max_tokens_per_call=limits.max_tokens_per_call,
        max_queued_calls=limits.max_queued_calls,
        max_queue_wait_s=limits.max_queue_wait_s,
        max_owners=sessions.max_owners,
        max_connections=limits.max_connections,
        max_streams_per_connection=MAX_STREAMS_PER_CONNECTION,
        max_step_streams=limits.max_step_streams,
        max_wait_pending_s=limits.max_wait_pending_s,
        max_pending_waits=limits.max_pending_waits,
        max_rows_per_call=max(MIN_ROWS_PER_CALL, sessions.max_sequences),
        max_fields_per_request=FIELDS_PER_REQUEST + limits.max_tokens_per_call // block_size,
    )
