"""prefixcache: a gRPC daemon that shares the K/V blocks of common prompt prefixes.

Clients, and what they take and give, are the names here; they are imported when first used, so
that `import prefixcache` stays cheap: no grpc, no numpy, and no torch, which only a call of
`attach` imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefixcache import errors
from prefixcache.errors import PrefixCacheError

if TYPE_CHECKING:
    from prefixcache.attached import attach, attach_async
    from prefixcache.client import (
        AsyncClient,
        AsyncEventStream,
        AsyncSequence,
        AsyncStepStream,
        BlocksRemoved,
        BlocksStored,
        CacheCleared,
        CacheEvent,
        Client,
        Credentials,
        EventPosition,
        EventsLost,
        EventStream,
        Pending,
        PoolStats,
        Sequence,
        SequenceInfo,
        ServerInfo,
        SessionInfo,
        SnapshotEnded,
        SnapshotStarted,
        Step,
        StepStream,
        TenantStats,
        TlsCredentials,
    )
    from prefixcache.types import (
        AppendResult,
        AttentionOptions,
        BlockCopy,
        CacheUse,
        CommitResult,
        Explanation,
        ExtraKeys,
        FullHit,
        KeyDifference,
        KeyKind,
        LookupResult,
        Lora,
        MissReason,
        MultimodalItem,
        PromptEmbeds,
        ResultCode,
    )

__version__ = "0.1.0"

__all__ = [
    "AppendResult",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncSequence",
    "AsyncStepStream",
    "AttentionOptions",
    "BlockCopy",
    "BlocksRemoved",
    "BlocksStored",
    "CacheCleared",
    "CacheEvent",
    "CacheUse",
    "Client",
    "CommitResult",
    "Credentials",
    "EventPosition",
    "EventStream",
    "EventsLost",
    "Explanation",
    "ExtraKeys",
    "FullHit",
    "KeyDifference",
    "KeyKind",
    "LookupResult",
    "Lora",
    "MissReason",
    "MultimodalItem",
    "Pending",
    "PoolStats",
    "PrefixCacheError",
    "PromptEmbeds",
    "ResultCode",
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
    "__version__",
    "attach",
    "attach_async",
    "errors",
]

_CLIENT_NAMES = frozenset(
    {
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
    }
)


_ATTACHED_NAMES = frozenset({"attach", "attach_async"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "prefixcache.types"
    if name in _CLIENT_NAMES:
        module = "prefixcache.client"
    elif name in _ATTACHED_NAMES:
        module = "prefixcache.attached"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
