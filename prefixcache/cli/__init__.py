"""The command line: `prefixcache COMMAND`; `COMMANDS` lists them.

Owns the list of commands and the exit codes: 0 ok, 1 failure, 2 usage. Each command is the
function of its name in the module of its name, which is imported only when it is called: the
daemon and the clients load much that `--help` and `--version` do not need. A command that has
commands of its own is its module's `app`.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from prefixcache import __version__
from prefixcache.errors import InvalidArgumentError, PrefixCacheError

__all__ = ["COMMANDS", "app", "main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2

COMMANDS = {
    "serve": "Run the daemon until SIGTERM or SIGINT.",
    "info": "Show what a daemon is: version, pool, K/V layout, hashing and limits.",
    "health": "Ask whether a daemon serves: the exit code is 0 if it does, else 1.",
    "stats": "Show the hit rate, the pool's fill and other counts of a daemon.",
    "top": "Follow a daemon in the terminal: pool, hit rate, evictions, sequences, sessions, RPCs.",
    "events": "Print what becomes cached and what no longer is, as it happens.",
    "lookup": "Ask how much of a prompt is cached; changes nothing.",
    "explain": "Say why no more of a prompt is cached; changes nothing.",
    "replay": "Count hits and evictions of a request trace, exactly.",
    "analyze": "Size the pool from request traces: hits by pool size, working set, reuse.",
    "token": "Make bearer tokens for callers.",
    "bench": "Measure the cache, its RPCs and attention, beside floors of the same run.",
}
"""Commands and the first line of their help."""

# In markdown, brackets in a help text are text, and its lines are joined.
TYPER_SETTINGS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": "markdown"}


def load_command(name: str) -> Any:
    """The typer command `name`, with its options."""
    module = importlib.import_module(f"prefixcache.cli.{name}")
    single = getattr(module, "app", None)
    if single is None:
        single = typer.Typer(add_completion=False, **TYPER_SETTINGS)
        single.command(name)(getattr(module, name))
    command = typer.main.get_command(single)
    for part in (command, *getattr(command, "commands", {}).values()):
        for parameter in part.params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = " "  # typer would show a switch as if it took a <bool>
    return command


class _Commands(TyperGroup):
    """Loads a command when it is called; the placeholders are enough to list them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


app = typer.Typer(
    name="prefixcache",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **TYPER_SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prefixcache {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            metavar=" ",
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Share the K/V blocks of common prompt prefixes between inference engines."""


def _placeholder() -> None:
    raise AssertionError("resolve_command has put the command in its place")


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_placeholder)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; errors of ours become one line on standard error."""
    try:
        app(args=args, prog_name="prefixcache")
    except InvalidArgumentError as error:
        typer.echo(f"prefixcache: {error}", err=True)
        raise SystemExit(EXIT_USAGE) from None
    except PrefixCacheError as error:
        typer.echo(f"prefixcache: {error}", err=True)
        raise SystemExit(EXIT_FAILURE) from None
    raise SystemExit(0)
