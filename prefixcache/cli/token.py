"""`prefixcache token new`: a bearer token, and its entry for the file of `--auth`."""

from __future__ import annotations

import datetime
import json
import secrets
from enum import StrEnum
from typing import Annotated

import typer

from prefixcache.cli import TYPER_SETTINGS
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.auth_file import check_name, token_hash

app = typer.Typer(add_completion=False, no_args_is_help=True, **TYPER_SETTINGS)

_PREFIX = "pfx_"
"""Lets scanners of logs and repositories find one."""
_NUM_RANDOM_BYTES = 32


class _Role(StrEnum):
    CLIENT = "client"
    ADMIN = "admin"


@app.callback()
def token() -> None:
    """Make bearer tokens for callers."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant that its holder calls for.")],
    role: Annotated[
        list[_Role] | None,
        typer.Option(help="What its holder may do; may be repeated. (default client)"),
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(metavar="DAYS", min=1, max=36500, help="It expires then. (default never)"),
    ] = None,
) -> None:
    """Print a new random token, once, and the TOML entry that admits its holder.

    The entry has only the token's SHA-256: what was printed cannot be had again.
    """
    try:
        check_name(tenant)
    except ValueError as error:
        raise InvalidArgumentError("--tenant", str(error)) from None
    text = _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    roles = json.dumps([str(entry) for entry in role or [_Role.CLIENT]])
    typer.echo(text)
    typer.echo("\n[[identities]]")
    typer.echo(f'token_sha256 = "{token_hash(text).hex()}"')
    typer.echo(f"tenant = {json.dumps(tenant)}")
    typer.echo(f"roles = {roles}")
    if days is not None:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        typer.echo(f"expires = {end:%Y-%m-%dT%H:%M:%SZ}")
