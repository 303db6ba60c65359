"""What the parts of a run found, and the table of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Figures:
    """Of one part.

    clients: processes at the same time. lost: calls that were never answered, or later than their
    deadline allows. leaked: blocks that are referenced although nobody is left. wrong: replies or
    K/V that are not what they must be, and states that a refused call has changed. problems: what
    else must not be, in words.
    """

    name: str
    clients: int = 1
    seconds: float = 0.0
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    leaked: int = 0
    wrong: int = 0
    checked: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.leaked or self.wrong or self.problems)

    def add(self, other: Figures) -> None:
        """Of a run of the same part that came after."""
        self.clients = max(self.clients, other.clients)
        for name in ("seconds", "calls", "lost", "leaked", "wrong", "checked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults
        self.problems += other.problems
        self.notes += other.notes


_COLUMNS = (
    *("part", "clients", "seconds", "calls", "calls/s", "faults", "hits checked"),
    *("lost", "leaked", "wrong", "other"),
)


def table(parts: Iterable[Figures]) -> str:
    rows = [_COLUMNS, *(_row(part) for part in parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def details(part: Figures) -> str:
    """What the table has no room for."""
    faults = ", ".join(f"{count} {name}" for name, count in sorted(part.faults.items()))
    lines = [f"{part.name}: {faults or 'no faults'}", *part.notes]
    lines += [f"PROBLEM: {problem}" for problem in part.problems]
    return "\n  ".join(lines)


def _row(part: Figures) -> tuple[str, ...]:
    rate = part.calls / part.seconds if part.seconds else 0.0
    return (
        part.name,
        str(part.clients),
        f"{part.seconds:.0f}",
        str(part.calls),
        f"{rate:.0f}",
        str(part.faults.total()),
        str(part.checked),
        str(part.lost),
        str(part.leaked),
        str(part.wrong),
        str(len(part.problems)),
    )
