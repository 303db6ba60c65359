"""What a client waits for shortly it waits for longer in tests: for a slow machine."""

from __future__ import annotations

import pytest

from prefixcache.client import peer_connection
from tests.support.waiting import WAIT_S


@pytest.fixture(autouse=True)
def peer_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon's peer socket answers at once, as far as a client can tell."""
    monkeypatch.setattr(peer_connection, "_TIMEOUT_S", WAIT_S)
