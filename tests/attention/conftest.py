"""How float8 is converted on a device and in the interpreter, and how many threads compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefixcache.attention import selection


@pytest.fixture(params=["float8 by instruction", "float8 by hand"])
def float8_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As this device does it, and as those do that have no instruction for it."""
    if request.param == "float8 by hand":
        monkeypatch.setattr(selection, "FLOAT8_ARCHITECTURES", set())


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
