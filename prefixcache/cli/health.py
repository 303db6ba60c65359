"""`prefixcache health`: for the health checks of containers, and for scripts."""

from __future__ import annotations

import typer

from prefixcache.cli import EXIT_FAILURE
from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, Target, Timeout, reached


@takes_credentials
def health(
    credentials: MakeCredentials,
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Ask whether a daemon serves: the exit code is 0 if it does, else 1.

    Needs no token, also under access control.
    """
    with reached(target, timeout) as address:
        from prefixcache.client.health import SERVING, check_health

        status = check_health(address, timeout_s=timeout, credentials=credentials())
    typer.echo(status)
    if status != SERVING:
        raise typer.Exit(EXIT_FAILURE)
