"""`prefixcache info`: what a daemon says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, AsJson, Target, Timeout, connect
from prefixcache.cli.output import label, print_json, print_rows, show


@takes_credentials
def info(
    credentials: MakeCredentials,
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show what a daemon is: version, pool, K/V layout, hashing and limits."""
    with connect(target, timeout, credentials) as client:
        answer = client.server_info()
    if as_json:
        print_json(answer)
    else:
        print_rows(list(_rows(answer)))


def _rows(answer: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    assert is_dataclass(answer)
    for field in fields(answer):
        value, name = getattr(answer, field.name), prefix + label(field.name)
        if is_dataclass(value):
            yield from _rows(value, f"{name} ")
        else:
            yield name, show(field.name, value)
