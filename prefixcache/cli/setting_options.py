"""Settings of `prefixcache.options` as options of a typer command.

Values go on as text: the configuration reads those of all sources in the same way.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, get_args

import typer

from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS, Option
from prefixcache.sizes import format_size


def setting_parameter(
    option: Option, *, panel: str | None = None, has_env: bool = True
) -> inspect.Parameter:
    """A parameter for the signature that typer reads.

    panel: heads its part of the help, by default the section's title. has_env: the command reads
    the setting's environment variable too.
    """
    kind = bool if option.is_switch else list[str] if option.is_list else str
    name = f"{option.flag}/--no-{option.flag[2:]}" if option.is_switch else option.flag
    info = typer.Option(
        name,
        help=f"{option.help} {_names(option, has_env)}".strip(),
        metavar=_metavar(option),
        rich_help_panel=panel or option.title,
        show_default=False,
        autocompletion=(lambda: list(option.choices)) if option.choices else None,
    )
    return keyword(option.key, Annotated[kind | None, info])


def keyword(name: str, annotation: object, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_flag(error: InvalidArgumentError) -> InvalidArgumentError:
    """The parts of the daemon name a value by its key; its flag is what was given."""
    option = OPTIONS.get(error.field)
    if option is None:
        return error
    return InvalidArgumentError(option.flag, error.message.removeprefix(f"{error.field}: "))


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


def _names(option: Option, has_env: bool) -> str:
    """Choices, environment name and default, in parentheses."""
    default = option.field.default
    names = [" | ".join(option.choices)] if option.choices else []
    if has_env:
        names.append(option.env)
    if isinstance(default, bool):
        names.append(f"default {'on' if default else 'off'}")
    elif option.unit == "bytes" and default is not None:
        names.append(f"default {format_size(default)}")
    elif default not in (None, (), ""):
        names.append(f"default {default:g}" if isinstance(default, float) else f"default {default}")
    return f"({'; '.join(names)})" if names else ""
