"""`prefixcache top`: a live view of a daemon in the terminal, or one snapshot of it."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, Target, Timeout, reached
from prefixcache.cli.top_view import NUM_ROWS, Screen, render
from prefixcache.cli.top_watch import Watch, look
from prefixcache.errors import FailedPreconditionError
from prefixcache.types import SequenceOrder

_DEFAULT_INTERVAL_S = 2.0
_FIRST_ORDER = SequenceOrder.MOST_BLOCKS
_PIPE_WIDTH = 80


@takes_credentials
def top(
    credentials: MakeCredentials,
    interval: Annotated[
        float,
        typer.Argument(metavar="SECONDS", min=0.1, help="Between two looks."),
    ] = _DEFAULT_INTERVAL_S,
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot and exit; needs no textual.")
    ] = False,
) -> None:
    """Follow a daemon in the terminal: pool, hit rate, evictions, sequences, sessions, RPCs.

    q quits, s sorts the sequences by blocks, newest or oldest, p pauses. NO_COLOR is obeyed.
    """
    if once:
        _print_once(target, timeout, credentials)
    else:
        _follow(interval, target, timeout, credentials)


def _print_once(target: str | None, timeout_s: float, credentials: MakeCredentials) -> None:
    from prefixcache.client import Client

    with (
        reached(target, timeout_s) as address,
        Client(address, timeout_s=timeout_s, credentials=credentials()) as client,
    ):
        seen = look(client, _FIRST_ORDER, NUM_ROWS)
    console = Console(highlight=False)
    width = console.width if console.is_terminal else _PIPE_WIDTH
    for line in render(Screen(address, seen), width):
        console.print(line, no_wrap=True, crop=False, soft_wrap=True)


def _follow(
    interval_s: float, target: str | None, timeout_s: float, credentials: MakeCredentials
) -> None:
    try:
        from prefixcache.cli.top_app import TopApp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "textual":
            raise
        raise FailedPreconditionError(
            "the live view needs textual: pip install 'prefixcache[top]', "
            "or print a snapshot with --once"
        ) from None
    from prefixcache.client import Client

    with reached(target, timeout_s) as address:
        watch = Watch(
            address,
            lambda: Client(address, timeout_s=timeout_s, credentials=credentials()),
            interval_s,
        )
        first = watch.look(_FIRST_ORDER, NUM_ROWS)
    app = TopApp(watch, first, interval_s, with_colours=not os.environ.get("NO_COLOR"))
    app.run()
    raise typer.Exit(app.return_code or 0)
