"""`bench access`: daemons of either kind, asked in turn."""

from __future__ import annotations

import pytest

from tests.bench.run_bench import report_of, rows_named

OPEN = "without access control"


def test_every_way_to_be_known_is_measured_beside_none(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "access", "--quick")
    for tokens in (100, 2000):
        (plain,) = rows_named(report, OPEN, tokens=tokens)
        assert plain["ratios"] == {}
        for name in ("with a token", "as a user of the host"):
            (row,) = rows_named(report, name, tokens=tokens)
            assert row["count"] == 20
            assert row["ratios"][OPEN] == pytest.approx(
                row["median_s"] / plain["median_s"], rel=1e-3
            )
            assert row["target"]["at_most"] == 1.15
