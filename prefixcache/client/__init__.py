"""Clients of the daemon: `Client` for threads and `AsyncClient` for asyncio, twins.

Both build their calls and read the replies with the same code, which does no I/O. No torch is
imported here; tensors of torch are taken and given all the same.
"""

from prefixcache.client.aio import AsyncClient
from prefixcache.client.aio_events import AsyncEventStream
from prefixcache.client.aio_sequence import AsyncSequence
from prefixcache.client.aio_steps import AsyncStepStream
from prefixcache.client.channel import channel_options
from prefixcache.client.credentials import Credentials, TlsCredentials
from prefixcache.client.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    EventPosition,
    EventsLost,
    SnapshotEnded,
    SnapshotStarted,
)
from prefixcache.client.results import SequenceInfo, ServerInfo, SessionInfo
from prefixcache.client.step import Pending, Step
from prefixcache.client.sync import Client
from prefixcache.client.sync_events import EventStream
from prefixcache.client.sync_sequence import Sequence
from prefixcache.client.sync_steps import StepStream
from prefixcache.core.stats import PoolStats, TenantStats

__all__ = [
    "AsyncClient",
    "AsyncEventStream",
    "AsyncSequence",
    "AsyncStepStream",
    "BlocksRemoved",
    "BlocksStored",
    "CacheCleared",
    "CacheEvent",
    "Client",
    "Credentials",
    "EventPosition",
    "EventStream",
    "EventsLost",
    "Pending",
    "PoolStats",
    "Sequence",
    "SequenceInfo",
    "ServerInfo",
    "SessionInfo",
    "SnapshotEnded",
    "SnapshotStarted",
    "Step",
    "StepStream",
    "TenantStats",
    "TlsCredentials",
    "channel_options",
]
