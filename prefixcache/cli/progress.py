"""A bar on stderr while a command runs, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Bars that are gone when the block ends; without a terminal nothing is shown."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield progress
