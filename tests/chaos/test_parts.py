"""The parts of `make chaos` in their smaller form: nothing is lost, leaked or wrong."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import PARTS, run
from tests.chaos.report import details, table

SEED = 20
SECONDS = 60.0


@pytest.mark.chaos
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost_leaked_or_wrong(part: str) -> None:
    figures = run(part, SEED, SECONDS)
    print(details(figures))
    print(table([figures]))
    assert figures.is_clean, details(figures)
