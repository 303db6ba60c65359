"""The effective configuration as TOML that `--config` reads back.

Secrets are left out, so a file made of it needs its seed from the environment. Pure functions.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from prefixcache.cli.load_config import LoadedConfig
from prefixcache.options import OPTIONS, Option
from prefixcache.sizes import format_size


def render_config(loaded: LoadedConfig) -> str:
    """TOML text; a comment after each value says where it came from."""
    lines = ["# Effective configuration of prefixcache serve."]
    for title, options in groupby(OPTIONS.values(), key=lambda option: option.title):
        lines += ["", f"# {title}"]
        lines += [_render_option(option, loaded) for option in options]
    return "\n".join(lines) + "\n"


def _render_option(option: Option, loaded: LoadedConfig) -> str:
    value = option.value_in(loaded.config)
    # A file's name may hold anything, and a comment is one line.
    origin = " ".join(loaded.origins.get(option.key, "default").split())
    if option.is_secret:
        return f"# {option.key} is {'unset' if value is None else 'set'}  # {origin}"
    if value is None:
        return f"# {option.key} is unset  # {origin}"
    return f"{option.key} = {toml_value(option, value)}  # {origin}"


def toml_value(option: Option, value: object) -> str:
    """One value in TOML; sizes in the units that people write."""
    if option.unit == "bytes" and isinstance(value, int):
        return _toml_string(format_size(value))
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_string(str(item)) for item in value) + "]"
    if isinstance(value, str | Path):
        return _toml_string(str(value))
    return json.dumps(value)


def _toml_string(text: str) -> str:
    # A JSON string is a TOML one, but for DEL, and for escaped surrogates, which are not made.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
