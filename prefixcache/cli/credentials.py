"""What the commands that ask a daemon show it: files named by flags, and the environment.

The token itself is no flag: other users of the host see command lines.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixcache.errors import InvalidArgumentError

if TYPE_CHECKING:
    from prefixcache.client import Credentials

TOKEN_ENV = "PREFIXCACHE_TOKEN"
_CLIENT_ENV = "PREFIXCACHE_CLIENT_"
_PANEL = "Credentials"


def _file(flag: str, env: str, text: str) -> Any:
    option = typer.Option(
        flag,
        metavar="FILE",
        envvar=env,
        show_envvar=False,
        rich_help_panel=_PANEL,
        help=f"{text} ({env})",
    )
    return Annotated[str | None, option]


_OPTIONS = {
    "token_file": _file(
        "--token-file",
        "PREFIXCACHE_TOKEN_FILE",
        f"File with the bearer token. Left out, it is the text of {TOKEN_ENV}.",
    ),
    "tls_ca": _file(
        "--tls-ca", f"{_CLIENT_ENV}TLS_CA", "CA that has signed the daemon's certificate (PEM)."
    ),
    "tls_cert": _file(
        "--tls-cert", f"{_CLIENT_ENV}TLS_CERT", "Certificate to show the daemon (PEM)."
    ),
    "tls_key": _file("--tls-key", f"{_CLIENT_ENV}TLS_KEY", "Private key of --tls-cert (PEM)."),
}


def takes_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options in place of its parameter `credentials`.

    It gets a function that makes `Credentials` of them, since those load the client.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "credentials"
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]

    @wraps(command, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def with_options(**given: Any) -> None:
        files = {name: given.pop(name) for name in _OPTIONS}
        command(**given, credentials=lambda: read_credentials(**files))

    # typer reads the options off the signature, unless there are annotations.
    with_options.__annotations__ = {}
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


MakeCredentials = Callable[[], "Credentials"]


def no_credentials() -> Credentials:
    """For a daemon without access control."""
    from prefixcache.client.credentials import NO_CREDENTIALS

    return NO_CREDENTIALS


def read_credentials(
    token_file: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> Credentials:
    """Raises InvalidArgumentError, naming the flag."""
    from prefixcache.client import Credentials, TlsCredentials

    token = os.environ.get(TOKEN_ENV) or None
    token_source = TOKEN_ENV
    if token_file is not None:
        token_source = "--token-file"
        token = _text("--token-file", token_file)
    if (tls_cert is None) != (tls_key is None):
        missing = "--tls-cert" if tls_cert is None else "--tls-key"
        raise InvalidArgumentError(missing, "is missing: a certificate and its key go together")
    tls = None
    if tls_ca is not None or tls_cert is not None:
        tls = TlsCredentials(
            _bytes("--tls-ca", tls_ca), _bytes("--tls-cert", tls_cert), _bytes("--tls-key", tls_key)
        )
    try:
        return Credentials(token, tls)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            token_source, error.message.removeprefix(f"{error.field}: ")
        ) from None


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(flag, _problem(path, error)) from None


def _bytes(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(flag, _problem(path, error)) from None


def _problem(path: str, error: Exception) -> str:
    return f"{path}: {error.strerror if isinstance(error, OSError) else 'is no text'}"
