from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.engine import tiny_model
from tests.examples.engine.endpoint import daemon_for
from tests.support.daemon import RunningDaemon


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's, and its tokenizer's."""
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RunningDaemon]:
    """A daemon for that model."""
    with daemon_for(folder) as running:
        yield running
