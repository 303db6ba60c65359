"""What the commands that ask a daemon share: `--target`, `--timeout`, and the connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.address import default_target, parse_address
from prefixcache.cli.credentials import MakeCredentials
from prefixcache.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from prefixcache.client import Client

TARGET_ENV = "PREFIXCACHE_TARGET"
DEFAULT_TIMEOUT_S = 10.0

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="ADDR",
        envvar=TARGET_ENV,
        show_envvar=False,
        help="The daemon: unix:/path or host:port. Left out, it is prefixcache.sock in "
        f"$XDG_RUNTIME_DIR or /run/prefixcache. ({TARGET_ENV})",
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Wait so long for an answer."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def reached(target: str | None, timeout_s: float) -> Iterator[str]:
    """The daemon's address. Raises InvalidArgumentError for a target that is no address.

    A daemon that cannot be reached in the block, or does not answer, is named in the error.
    """
    address = str(default_target(os.environ)) if target is None else target
    try:
        parse_address(address)
    except ValueError as error:
        raise InvalidArgumentError("--target", str(error)) from None
    try:
        yield address
    except DeadlineExceededError as error:
        raise DeadlineExceededError(
            f"the daemon at {address} did not answer within {timeout_s:g} s"
        ) from error
    except UnavailableError as error:
        raise UnavailableError(f"no daemon can be reached at {address}: {error.message}") from error


@contextmanager
def connect(target: str | None, timeout_s: float, credentials: MakeCredentials) -> Iterator[Client]:
    """A client of the daemon that is `reached`."""
    with reached(target, timeout_s) as address:
        from prefixcache.client import Client

        with Client(address, timeout_s=timeout_s, credentials=credentials()) as client:
            yield client
