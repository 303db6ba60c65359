"""What the commands that replay a request trace share: its options, their checks, the reading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.errors import InvalidArgumentError

if TYPE_CHECKING:
    from prefixcache.replay import Trace

DEFAULT_TRACE_BLOCK = 512

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="JSON lines with input_length and hash_ids or hash_runs.",
    ),
]
TraceBlock = Annotated[int, typer.Option(min=1, help="Tokens that one id of the trace stands for.")]


def check_divides(block_size: int, trace_block: int) -> None:
    if trace_block % block_size:
        raise typer.BadParameter(
            f"{block_size} does not divide the trace block of {trace_block} tokens",
            param_hint="--block-size",
        )


def open_trace(path: Path, trace_block: int, first: int | None) -> Trace:
    """An unreadable trace is a usage error."""
    from prefixcache.replay import read_trace

    try:
        return read_trace(path, trace_block, first)
    except InvalidArgumentError as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="TRACE") from error
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
