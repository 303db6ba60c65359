"""What the commands that replay a request trace share: its options, their checks, the reading."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixcache.cli.progress import progress_bar
from prefixcache.errors import InvalidArgumentError
from prefixcache.replay.trace_file import DEFAULT_TRACE_BLOCK

if TYPE_CHECKING:
    from prefixcache.replay import Trace


def trace_argument() -> Any:
    """The argument that names a trace, or several."""
    return typer.Argument(
        metavar="TRACE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="JSON lines with input_length and hash_ids or hash_runs (Mooncake's, or of `serve "
        "--record`) or with prompts as text (AIBrix's), or CSV with times and lengths (Azure's).",
    )


TracePath = Annotated[Path, trace_argument()]
TraceBlock = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens that one id of the trace stands for. By default what the trace says, else "
        f"{DEFAULT_TRACE_BLOCK}.",
    ),
]


def check_divides(block_size: int, trace_block: int) -> None:
    if trace_block % block_size:
        raise typer.BadParameter(
            f"{block_size} does not divide the trace block of {trace_block} tokens",
            param_hint="--block-size",
        )


def open_trace(path: Path, trace_block: int | None, first: int | None) -> Trace:
    """An unreadable trace is a usage error."""
    from prefixcache.replay import read_trace

    try:
        with progress_bar() as bar:
            task = bar.add_task(f"reading {path.name}", total=path.stat().st_size)
            on_read = None if bar.disable else partial(bar.advance, task)
            return read_trace(path, trace_block, first, on_read)
    except InvalidArgumentError as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="TRACE") from error
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
