"""Results of a benchmark: rows with ratios and targets, as JSON or as tables.

Owns the form of the output and nothing of its content. JSON keys are stable, with the unit in the
name. Pure, but for `print_report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from prefixcache.bench.machine import MachineFacts
from prefixcache.bench.measure import Summary

_PLAIN_WIDTH = 200
"""Columns where the output is no terminal: no row is broken."""
_MET = {True: "met", False: "missed"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The row's median over that of something else in the same run."""

    of: str
    value: float


@dataclass(frozen=True, slots=True)
class Target:
    """What the row should reach: a ratio to `of`, or without one a median in the row's unit."""

    limit: float
    of: str | None = None
    at_most: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    unit: `s`, `bytes`, `per_s`, `tb_per_s` (10^12 bytes a second), `tflop_per_s`, or `ratio`.
    labels: what tells it from others of its name.
    """

    section: str
    name: str
    summary: Summary
    unit: str = "s"
    labels: Mapping[str, str | int] = field(default_factory=dict)
    ratios: tuple[Ratio, ...] = ()
    target: Target | None = None

    @property
    def targeted_value(self) -> float | None:
        """What its target is about; None without a target, or without what it is a ratio of."""
        if self.target is None:
            return None
        if self.target.of is None:
            return self.summary.median
        return next((ratio.value for ratio in self.ratios if ratio.of == self.target.of), None)

    @property
    def target_met(self) -> bool | None:
        """None if it cannot be told."""
        value = self.targeted_value
        if self.target is None or value is None:
            return None
        return value <= self.target.limit if self.target.at_most else value >= self.target.limit


@dataclass(frozen=True, slots=True)
class Report:
    """All that one command found. `notes`: sentences about the whole."""

    bench: str
    machine: MachineFacts
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "bench": report.bench,
        "machine": report.machine,
        "settings": dict(report.settings),
        "seconds": round(report.seconds, 3),
        "notes": list(report.notes),
        "results": [_row_to_json(row) for row in report.rows],
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"section": row.section, "name": row.name, **row.labels}
    for name in ("median", "min", "max", "p99"):
        found[f"{name}_{row.unit}"] = _rounded(getattr(row.summary, name))
    found["count"] = row.summary.count
    found["ratios"] = {ratio.of: _rounded(ratio.value) for ratio in row.ratios}
    if row.target is not None:
        bound = "at_most" if row.target.at_most else "at_least"
        found["target"] = {
            bound: row.target.limit,
            "of": row.target.of,
            "met": row.target_met,
        }
    return found


def _rounded(value: float) -> float:
    """Six significant digits: more are noise."""
    return float(f"{value:.6g}")


def print_report(report: Report) -> None:
    """Tables to standard output, one a section; without a terminal in plain, unbroken lines."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)
    facts = report.machine
    console.print(
        f"{facts.cpu}, {facts.cores} cores, {', '.join(facts.gpus) or 'no GPU'}, "
        f"load {facts.load:g}; Python {facts.python}, {facts.core} core"
    )
    for section, rows in groupby(report.rows, key=lambda row: row.section):
        console.print()
        console.print(_table(section, list(rows)))
    targeted = [row for row in report.rows if row.target is not None]
    if targeted:
        console.print()
        console.print(_targets_table(targeted))
    console.print()
    for note in report.notes:
        console.print(note)
    console.print(f"{report.seconds:.0f} s in all")


def _targets_table(rows: list[Row]) -> Table:
    """What has a target, once more and together."""
    table = _empty_table("Targets")
    for name in ("", "of", "measured", "target"):
        table.add_column(name)
    for row in rows:
        assert row.target is not None
        value = row.targeted_value
        unit = row.unit if row.target.of is None else "ratio"
        shown = "not measured" if value is None else show_value(value, unit)
        labels = ", ".join(
            f"{name.replace('_', ' ')} {show_label(label)}" for name, label in row.labels.items()
        )
        table.add_row(f"{row.section}: {row.name}", labels, shown, _target_text(row))
    return table


def _empty_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )


def _table(section: str, rows: list[Row]) -> Table:
    labels = list(dict.fromkeys(label for row in rows for label in row.labels))
    has_ratios = any(row.ratios for row in rows)
    has_targets = any(row.target for row in rows)
    table = _empty_table(section)
    table.add_column("")
    for name in labels:
        table.add_column(name.replace("_", " "), justify="right")
    for name in ("median", "min", "max", "p99", "count"):
        table.add_column(name, justify="right")
    if has_ratios:
        table.add_column("beside")
    if has_targets:
        table.add_column("target")
    for row in rows:
        cells = [row.name]
        cells += [show_label(row.labels.get(name, "")) for name in labels]
        cells += list(_numbers(row))
        if has_ratios:
            cells.append(", ".join(f"{show_ratio(r.value)} {r.of}" for r in row.ratios))
        if has_targets:
            cells.append(_target_text(row))
        table.add_row(*cells)
    return table


def _numbers(row: Row) -> Iterator[str]:
    summary = row.summary
    for value in (summary.median, summary.min, summary.max, summary.p99):
        yield show_value(value, row.unit)
    yield f"{summary.count:,}"


def _target_text(row: Row) -> str:
    if row.target is None:
        return ""
    sign = "<=" if row.target.at_most else ">="
    if row.target.of is None:
        text = f"{sign} {show_value(row.target.limit, row.unit)}"
    else:
        text = f"{sign} {show_ratio(row.target.limit)} {row.target.of}"
    met = row.target_met
    return text if met is None else f"{text}: {_MET[met]}"


def show_label(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def show_ratio(value: float) -> str:
    """`1.25x`, or for what is much smaller than the other `1/20`."""
    return f"1/{_digits(1 / value)}" if 0 < value < 0.2 else f"{_digits(value)}x"


def show_value(value: float, unit: str) -> str:
    if unit == "s":
        return _show_seconds(value)
    if unit == "ratio":
        return show_ratio(value)
    factor, name = _UNIT_NAMES[unit]
    if factor == "T" and abs(value) < 0.1:
        factor, value = "G", value * 1000
    return f"{_digits(value)} {factor}{name}"


_UNIT_NAMES = {
    "bytes": ("", "B"),
    "per_s": ("", "/s"),
    "tb_per_s": ("T", "B/s"),
    "tflop_per_s": ("T", "FLOP/s"),
}


def _show_seconds(value: float) -> str:
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{_digits(value * factor)} {name}"
    return f"{_digits(value * 1e9)} ns"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent for what is large."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
