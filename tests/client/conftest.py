from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefixcache.client import aio_connection, aio_keeper, sync_connection, sync_keeper
from tests.client.fake_daemon import FakeDaemon, fake_daemon
from tests.client.twins import open_client
from tests.support.patience import peer_patience  # noqa: F401 - a fixture
from tests.support.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client waits for shortly, as it can do without: on a slow machine it may take longer.

    A test for which it never comes takes `haste`.
    """
    _wait_for(WAIT_S, monkeypatch)


@pytest.fixture
def haste(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _wait_for(1.0, monkeypatch)


def _wait_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for connection in (sync_connection, aio_connection):
        monkeypatch.setattr(connection, "FREE_TIMEOUT_S", seconds)
    for keeper in (sync_keeper, aio_keeper):
        monkeypatch.setattr(keeper, "FIRST_BEAT_WAIT_S", seconds)


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon() as daemon:
        yield daemon


@pytest.fixture(params=["sync", "async"])
def client_kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(client_kind: str, fake: FakeDaemon) -> Iterator[Any]:
    """Without a session, so that nothing but its calls reaches the fake daemon."""
    with open_client(client_kind, fake.target, session_ttl_s=None) as opened:
        yield opened
