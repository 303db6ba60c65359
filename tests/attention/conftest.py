"""How float8 is converted, for tests of kernels on a device and in the interpreter."""

from __future__ import annotations

import pytest

from prefixcache.attention import selection


@pytest.fixture(params=["float8 by instruction", "float8 by hand"])
def float8_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As this device does it, and as those do that have no instruction for it."""
    if request.param == "float8 by hand":
        monkeypatch.setattr(selection, "FLOAT8_ARCHITECTURES", set())
