from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attached.served import Served, serve
from tests.support.patience import peer_patience  # noqa: F401 - a fixture


@pytest.fixture
def served() -> Iterator[Served]:
    """Plain K/V in float32."""
    with serve("float32") as served:
        yield served
