"""Gather the configuration of `serve`: flag > environment > file > default.

Owns the order of the sources, the reading of the file, the default socket, and the checks that
look at the host. What a setting may be is `prefixcache.config`'s business.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic_settings import EnvSettingsSource

from prefixcache.address import UnixAddress, check_socket_folder, default_listen_address
from prefixcache.config import ServeConfig
from prefixcache.config.section import ENV_PREFIX
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS, SECTIONS, did_you_mean, make_config

CONFIG_ENV = ENV_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and for each key that is not at its default where the value came from."""

    config: ServeConfig
    origins: Mapping[str, str]


def load_config(flags: Mapping[str, object], config_file: str | None) -> LoadedConfig:
    """The configuration of `serve`. Reads the environment, the file, and the socket's folder.

    flags: values of the command line by key. config_file: `--config`, else `PREFIXCACHE_CONFIG`
    is asked. Raises InvalidArgumentError, which says where the bad value came from.
    """
    path = config_file or os.environ.get(CONFIG_ENV) or None
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    if path is not None:
        values.update(read_file(Path(path)))
        origins.update(dict.fromkeys(values, f"file {path}"))
    from_environment = read_environment()
    values.update(from_environment)
    origins.update({key: f"environment {OPTIONS[key].env}" for key in from_environment})
    values.update(flags)
    origins.update({key: f"flag {OPTIONS[key].flag}" for key in flags})
    if not values.get("listen"):
        values["listen"] = (str(default_listen_address(os.environ)),)
        origins.pop("listen", None)
    try:
        config = make_config(values)
        _check_host(config)
    except InvalidArgumentError as error:
        raise _with_origin(error, origins) from None
    return LoadedConfig(config, origins)


def read_environment() -> dict[str, object]:
    """Settings in the environment, by key; an empty variable counts as unset.

    Other PREFIXCACHE_ variables are none of our business: for a service named `prefixcache`,
    Kubernetes sets PREFIXCACHE_SERVICE_HOST, PREFIXCACHE_PORT and more in every pod.
    """
    values: dict[str, object] = {}
    for section in SECTIONS.values():
        values.update(EnvSettingsSource(section)())
    return values


def read_file(path: Path) -> dict[str, object]:
    """The keys of a TOML file. Raises InvalidArgumentError for one that is no setting."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError("--config", f"{path}: {error.strerror}") from None
    except ValueError as error:  # also of tomllib and of the decoder
        raise InvalidArgumentError("--config", f"{path}: {error}") from None
    for key, value in values.items():
        if key in OPTIONS:
            continue
        if isinstance(value, dict):
            problem = f"{path}: [{key}] is a table; the settings stand at the top, without tables"
        else:
            problem = f"{path}: {key!r} is no setting{did_you_mean(key, OPTIONS)}"
        raise InvalidArgumentError("--config", problem)
    return values


def _check_host(config: ServeConfig) -> None:
    for address in config.network.addresses:
        if isinstance(address, UnixAddress):
            try:
                check_socket_folder(address)
            except ValueError as error:
                raise InvalidArgumentError("--listen", str(error)) from None
    files = {
        "--model-config": config.model.model_config_path,
        "--kv-scale-file": config.model.kv_scale_file,
        "--auth": config.access.auth,
        "--tls-cert": config.access.tls_cert,
        "--tls-key": config.access.tls_key,
        "--tls-client-ca": config.access.tls_client_ca,
    }
    for flag, path in files.items():
        if path is not None and not path.is_file():
            raise InvalidArgumentError(flag, f"{path} is not a file")


def _with_origin(error: InvalidArgumentError, origins: Mapping[str, str]) -> InvalidArgumentError:
    """Say where the value came from, unless its flag, which the message starts with."""
    key = error.field.removeprefix("--").replace("-", "_")
    origin = origins.get(key, "flag")
    if origin.startswith("flag"):
        return error
    problem = error.message.removeprefix(f"{error.field}: ")
    return InvalidArgumentError(error.field, f"{problem} (from {origin})")
