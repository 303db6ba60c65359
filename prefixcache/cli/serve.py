"""`prefixcache serve`: one option a setting, made from `OPTIONS`.

Values go on as text: the configuration reads those of all sources in the same way.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from prefixcache.cli.load_config import CONFIG_ENV, load_config
from prefixcache.cli.print_config import render_config
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS, Option
from prefixcache.sizes import format_size

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
        raise _with_flag(error) from error
    raise typer.Exit(code)


def _with_flag(error: InvalidArgumentError) -> InvalidArgumentError:
    """The parts of the daemon name a value by its key; its flag is what was given."""
    option = OPTIONS.get(error.field)
    if option is None:
        return error
    return InvalidArgumentError(option.flag, error.message.removeprefix(f"{error.field}: "))


def _parameter(option: Option) -> inspect.Parameter:
    kind = bool if option.is_switch else list[str] if option.is_list else str
    name = f"{option.flag}/--no-{option.flag[2:]}" if option.is_switch else option.flag
    info = typer.Option(
        name,
        help=f"{option.help} {_names(option)}",
        metavar=_metavar(option),
        rich_help_panel=_SWITCH_PANEL if option.is_switch else option.title,
        show_default=False,
    )
    return _keyword(option.key, Annotated[kind | None, info])


def _keyword(name: str, annotation: object, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _metavar(option: Option) -> str:
    kinds = (option.field.annotation, *get_args(option.field.annotation))
    if option.is_switch:
        return " "
    if option.choices:
        return "NAME"
    if option.unit == "bytes":
        return "SIZE"
    if option.unit:
        return option.unit.upper()
    if option.is_list:
        return "ADDRESS"
    return "FILE" if Path in kinds else "NUMBER" if float in kinds else "TEXT"


def _names(option: Option) -> str:
    """Choices, environment name and default, in parentheses."""
    default = option.field.default
    names = [" | ".join(option.choices)] if option.choices else []
    names.append(option.env)
    if isinstance(default, bool):
        names.append(f"default {'on' if default else 'off'}")
    elif option.unit == "bytes" and default is not None:
        names.append(f"default {format_size(default)}")
    elif default not in (None, (), ""):
        names.append(f"default {default:g}" if isinstance(default, float) else f"default {default}")
    return f"({'; '.join(names)})"


_PARAMETERS = [
    _keyword(
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
    _keyword(
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
    *(_parameter(option) for option in sorted(OPTIONS.values(), key=lambda o: o.is_switch)),
]
# typer reads the options off the signature.
serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
