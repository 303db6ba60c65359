"""Rows as JSON, with units in the names, and as tables."""

from __future__ import annotations

import json

import pytest

from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import summarize
from prefixcache.bench.report import (
    Ratio,
    Report,
    Row,
    Target,
    print_report,
    show_ratio,
    show_value,
    to_json,
)
from prefixcache.cli.output import print_json
from prefixcache.core.form import FORM

ROWS = (
    Row("Calls", "lookup", summarize([1e-3, 2e-3, 6e-3]), labels={"tokens": 2000}),
    Row(
        "Calls",
        "append",
        summarize([4e-5]),
        ratios=(Ratio("echo", 1.5),),
        target=Target(1.25, of="echo"),
    ),
    Row("Calls", "free", summarize([4e-5]), target=Target(5e-5)),
    Row("Calls", "hash", summarize([1.0]), target=Target(0.05, of="vllm")),
    Row("Rates", "copy", summarize([0.02]), "tb_per_s", target=Target(0.01, at_most=False)),
)
REPORT = Report("core", machine_facts(), {"rounds_done": 3}, ROWS, ("a note",), 12.3456)


def test_json_has_a_median_with_its_unit_and_the_labels_of_each_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json(to_json(REPORT))
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == "core"
    assert report["seconds"] == 12.346
    assert report["settings"] == {"rounds_done": 3}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_bytes"] > 2**20
    assert report["machine"]["core"] == FORM
    assert report["machine"]["versions"]["grpcio"]
    first, *_, last = report["results"]
    assert first == {
        "section": "Calls",
        "name": "lookup",
        "tokens": 2000,
        "median_s": 0.002,
        "min_s": 0.001,
        "max_s": 0.006,
        "p99_s": pytest.approx(0.00592),
        "count": 3,
        "ratios": {},
    }
    assert last["median_tb_per_s"] == 0.02


@pytest.mark.parametrize(
    ("row", "expected"), list(zip(ROWS, [None, False, True, None, True], strict=True))
)
def test_a_target_is_met_by_a_ratio_or_a_median_or_cannot_be_told(
    row: Row, expected: bool | None
) -> None:
    assert row.target_met is expected


def test_tables_without_a_terminal_are_plain_unbroken_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(REPORT)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = text.splitlines()
    (lookup,) = [line for line in lines if line.startswith("lookup")]
    assert lookup.split() == ["lookup", "2,000", "2", "ms", "1", "ms", "6", "ms", "5.92", "ms", "3"]
    append, *_ = [line for line in lines if line.startswith("append")]
    assert "1.5x echo" in append
    assert "<= 1.25x echo: missed" in append
    assert any("<= 50 us: met" in line for line in lines)
    assert any("<= 1/20 vllm" in line and "m" not in line.split("vllm")[1] for line in lines)
    assert "a note" in lines
    (hashing,) = [line for line in lines if line.startswith("Calls: hash")]
    assert "not measured" in hashing
    (free,) = [line for line in lines if line.startswith("Calls: free")]
    assert free.split()[2:4] == ["40", "us"]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (131.2, "s", "131 s"),
        (1.5, "s", "1.5 s"),
        (0.9996, "s", "1,000 ms"),
        (12.34e-6, "s", "12.3 us"),
        (5e-9, "s", "5 ns"),
        (0.0, "s", "0 ns"),
        (160.4, "bytes", "160 B"),
        (12345.6, "per_s", "12,346 /s"),
        (4.123, "tflop_per_s", "4.12 TFLOP/s"),
        (0.0123, "tb_per_s", "12.3 GB/s"),
        (1.234, "ratio", "1.23x"),
    ],
)
def test_values_have_three_digits_and_a_unit(value: float, unit: str, shown: str) -> None:
    assert show_value(value, unit) == shown


@pytest.mark.parametrize(
    ("ratio", "shown"), [(1.0, "1x"), (0.05, "1/20"), (0.0, "0x"), (250, "250x")]
)
def test_small_ratios_are_fractions(ratio: float, shown: str) -> None:
    assert show_ratio(ratio) == shown
