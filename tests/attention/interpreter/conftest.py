"""Everything in this folder runs Triton kernels in the repaired interpreter, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import repaired


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    """The launchers take the Triton path, and the repairs are in place."""
    with pytest.MonkeyPatch.context() as patch, repaired():
        patch.setenv("TRITON_INTERPRET", "1")
        yield
