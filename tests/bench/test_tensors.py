"""`bench tensors`: calls by reference and in messages, beside memcpy."""

from __future__ import annotations

import pytest

from tests.bench.run_bench import report_of, rows_named


def test_all_ways_are_measured_beside_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "tensors", "--quick")
    for mebibytes in ("0.0625", "1"):
        (copied,) = rows_named(report, "memcpy", mebibytes=mebibytes)
        assert copied["median_s"] > 0
        (copies,) = rows_named(report, "by reference: its copies", mebibytes=mebibytes)
        assert copies["ratios"]["memcpy"] == pytest.approx(
            copies["median_s"] / copied["median_s"], rel=1e-2
        )
        for way in ("where they lie", "by reference", "in the messages"):
            (call,) = rows_named(report, f"{way}: call", mebibytes=mebibytes)
            (left,) = rows_named(report, f"{way}: without its computing", mebibytes=mebibytes)
            assert call["median_s"] > 0
            assert left["median_s"] < call["median_s"]
            assert left["ratios"]["memcpy"] == pytest.approx(
                left["median_s"] / copied["median_s"], rel=1e-2
            )
