"""What `prefixcache` exports, and what importing it does not pull in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import prefixcache
import prefixcache.client

PUBLIC = {
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
}


def _modules_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in found.stdout.split()}


def test_the_public_names_are_these_and_all_are_there():
    assert set(prefixcache.__all__) == PUBLIC
    assert prefixcache.__all__ == sorted(prefixcache.__all__)
    assert set(dir(prefixcache)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(prefixcache, name) is not None
    for name in prefixcache.client.__all__:
        assert getattr(prefixcache.client, name) is not None
    names = {}
    exec("from prefixcache import *", names)
    assert set(names) >= PUBLIC


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Cilent'"):
        prefixcache.Cilent  # noqa: B018


def test_the_version_is_a_plain_line_that_the_build_can_read():
    source = Path(prefixcache.__file__).read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    assert version == prefixcache.__version__


def test_importing_the_package_pulls_in_nothing_heavy():
    assert not {"torch", "grpc", "numpy", "google"} & _modules_after("import prefixcache")


def test_importing_the_clients_pulls_in_no_torch_and_no_server():
    modules = _modules_after("from prefixcache import Client, AsyncClient, ExtraKeys")
    assert not {"torch", "pydantic", "typer", "structlog"} & modules
    command = [sys.executable, "-c", "import prefixcache.client, sys; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not [
        name for name in loaded if name.startswith(("prefixcache.server", "prefixcache.engine"))
    ]
