"""`prefixcache bench` through its own command line, in the process of the test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.replay.cuts import FOLDER
from tests.support.command_line import call

TINY_CORE = ("core", "--quick", "--rounds", "2", "--tokens", "100,33", "--blocks", "3000")
EDGE = str(FOLDER / "edge_4.jsonl")
EDGE_SIZES = ("--trace-block", "4", "--block-size", "4")


def run_bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of a run that ends well."""
    outcome = call(capsys, "bench", *arguments)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    return outcome.stdout


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run_bench(capsys, *arguments, "--json"))
    return report


def rows_named(report: dict[str, Any], name: str, **labels: object) -> list[dict[str, Any]]:
    return [
        row for row in report["results"] if row["name"] == name and labels.items() <= row.items()
    ]
