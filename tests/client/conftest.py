from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.fake_daemon import FakeDaemon, fake_daemon
from tests.client.twins import open_client


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
