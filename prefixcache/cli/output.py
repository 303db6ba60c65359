"""How results are printed: JSON for programs, aligned rows for people.

Without a terminal there are no colours and no line breaks within a row, so that rows can be cut
and searched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixcache.sizes import format_size

Rows = Sequence[tuple[str, str | Text]]


def to_json(value: object) -> object:
    """Dataclasses become objects, bytes hexadecimal text, enums their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.name.lower() if isinstance(value, Enum) else value


def print_json(value: object, *, on_one_line: bool = False) -> None:
    typer.echo(json.dumps(to_json(value), indent=None if on_one_line else 2))


def print_rows(rows: Rows) -> None:
    """Print to standard output; the first cell of a row names it."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(make_table(rows))
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def make_table(rows: Rows) -> Table:
    """Rows for a terminal, which may be too narrow for some."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)
    return table


def show(name: str, value: object) -> str:
    """A value as people read it; the name's ending gives the unit."""
    if value is None or value in ("", ()):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return ", ".join(show(name, item) for item in value)
    if isinstance(value, int) and name.endswith("_bytes"):
        size = format_size(value)
        return f"{value:,}" if size == str(value) else f"{size} ({value:,})"
    if isinstance(value, int | float) and name.endswith("_s"):
        return f"{value:g} s"
    return f"{value:,}" if isinstance(value, int) else str(value)


def label(name: str) -> str:
    """`owner_ttl_s` as `owner ttl`."""
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
