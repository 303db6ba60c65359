"""What the commands that draw share: `--plot`, and the check that it can be done."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.errors import InvalidArgumentError

PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", dir_okay=False, help="Draw a PNG too (needs matplotlib)."
    ),
]


def check_plotting(path: Path | None) -> None:
    """Raises InvalidArgumentError where a picture is wanted and matplotlib is not installed, or
    the picture's folder does not exist: before anything is measured.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            "--plot", "needs matplotlib, which is not installed: pip install 'prefixcache[plot]'"
        )
    if not path.parent.is_dir():
        raise InvalidArgumentError("--plot", f"there is no folder {str(path.parent)!r}")
