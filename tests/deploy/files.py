"""What `deploy` holds, and the commands of the program that its files call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixcache.cli import load_command
from prefixcache.cli.load_config import read_file
from prefixcache.config import ServeConfig
from prefixcache.options import OPTIONS, make_config

REPOSITORY = Path(__file__).parents[2]
_FOLDER = REPOSITORY / "deploy"
ALERTS = _FOLDER / "prometheus" / "alerts.yml"
ALERTS_TEST = _FOLDER / "prometheus" / "alerts_test.yml"
SCRAPE = _FOLDER / "prometheus" / "scrape.yml"
UNIT = _FOLDER / "systemd" / "prefixcache.service"
USERS = _FOLDER / "systemd" / "sysusers.conf"
DOCKER = _FOLDER / "docker"
KUBERNETES = _FOLDER / "kubernetes"
DASHBOARD = _FOLDER / "grafana" / "prefixcache.json"


def alert_names() -> list[str]:
    return re.findall(r"- alert: (\w+)", ALERTS.read_text())


def parse_command(words: Sequence[str]) -> dict[str, Any]:
    """Options of a call of the program, as it reads them itself; fails for what it does not know.

    words: without the program's name.
    """
    name, *arguments = words
    parameters: dict[str, Any] = load_command(name).make_context(name, list(arguments)).params
    return parameters


def daemon_config(
    words: Sequence[str], environ: Mapping[str, str], config_file: Path | None = None
) -> ServeConfig:
    """Settings of a daemon: `serve` and its flags, variables, and what its --config holds."""
    assert words[0] == "serve"
    flags = {key: value for key, value in parse_command(words).items() if key in OPTIONS}
    keys = {option.env: option.key for option in OPTIONS.values()}
    values: dict[str, object] = {} if config_file is None else read_file(config_file)
    values |= {keys[name]: text for name, text in environ.items() if name != "PREFIXCACHE_TARGET"}
    # Of a flag that was left out: None, or no values.
    values |= {key: value for key, value in flags.items() if value not in (None, (), [])}
    values.setdefault("listen", ("unix:/run/prefixcache/prefixcache.sock",))
    return make_config(values)
