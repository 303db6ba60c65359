"""`prefixcache serve`: one option a setting, made from `OPTIONS`."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from prefixcache.cli.load_config import CONFIG_ENV, load_config
from prefixcache.cli.print_config import render_config
from prefixcache.cli.setting_options import keyword, setting_parameter, with_flag
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS

_FILE_PANEL = "Configuration file"
# A panel of their own: their --no- column would leave too little of 80 columns to the others.
_SWITCH_PANEL = "Switches"


def serve(**given: Any) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Each setting can also stand in the environment or in a TOML file: --num-blocks is
    PREFIXCACHE_NUM_BLOCKS there and num_blocks here. A flag wins over the environment, that over
    the file, and that over the default. On SIGHUP the file is read again, and a new log level
    and format are in force; other settings need a restart.
    """
    config_file: str | None = given.pop("config")
    wants_print: bool = given.pop("print_config")
    flags = {key: value for key, value in given.items() if value is not None}
    loaded = load_config(flags, config_file)
    if wants_print:
        typer.echo(render_config(loaded), nl=False)
        return
    from prefixcache.server.lifecycle import run

    try:
        code = run(loaded.config, lambda: load_config(flags, config_file).config)
    except InvalidArgumentError as error:
        raise with_flag(error) from error
    raise typer.Exit(code)


_PARAMETERS = [
    keyword(
        "config",
        Annotated[
            str | None,
            typer.Option(
                "--config",
                metavar="FILE",
                help=f"TOML file with settings. ({CONFIG_ENV})",
                rich_help_panel=_FILE_PANEL,
                show_default=False,
            ),
        ],
    ),
    keyword(
        "print_config",
        Annotated[
            bool,
            typer.Option(
                "--print-config",
                help="Print the effective settings as TOML, with where each came from, and exit.",
                rich_help_panel=_FILE_PANEL,
            ),
        ],
        default=False,
    ),
    *(
        setting_parameter(option, panel=_SWITCH_PANEL if option.is_switch else None)
        for option in sorted(OPTIONS.values(), key=lambda o: o.is_switch)
    ),
]
# typer reads the options off the signature.
serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
