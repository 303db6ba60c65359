"""`prefixcache events`: what becomes cached and what no longer is, a line each, as it happens."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, AsJson, Target, Timeout, connect
from prefixcache.cli.output import print_json, to_json

if TYPE_CHECKING:
    from prefixcache.client import CacheEvent

_SHOWN_BYTES = 6
"""Of a hash."""


@takes_credentials
def events(
    credentials: MakeCredentials,
    from_number: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="NUMBER", min=0, help="Begin with that event, without a snapshot."
        ),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot/--no-snapshot",
            help="Print what is cached first, and after a loss of events.",
        ),
    ] = True,
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Print what becomes cached and what no longer is, as it happens.

    The daemon must keep events (serve --event-buffer). Hashes are cut; with --json they are whole,
    with tokens and extra keys, one object a line.
    """
    from prefixcache.client.events import EventPosition

    start = None if from_number is None else EventPosition(from_number)
    with (
        suppress(KeyboardInterrupt),
        connect(target, timeout, credentials) as client,
        client.watch_events(start, snapshot=snapshot) as stream,
    ):
        for event in stream:
            if as_json:
                print_json(as_object(event), on_one_line=True)
            else:
                typer.echo(as_line(event))
            sys.stdout.flush()


def as_object(event: CacheEvent) -> dict[str, Any]:
    """For JSON: the event's fields, and its kind as `event`."""
    fields: dict[str, Any] = {name: getattr(event, name) for name in event.__slots__}
    if "token_ids" in fields:
        fields["token_ids"] = fields["token_ids"].tolist()
    return {"event": _kind(event), **{name: to_json(value) for name, value in fields.items()}}


def as_line(event: CacheEvent) -> str:
    """Number, time, kind and what it is about."""
    number, time_s = getattr(event, "number", None), getattr(event, "time_s", 0.0)
    when = datetime.fromtimestamp(time_s, UTC).strftime("%H:%M:%S.%f")[:-3] if time_s else ""
    shown = "" if number is None else str(number)
    return f"{shown:>8}  {when:12}  {_kind(event):16}  {_about(event)}".rstrip()


def _kind(event: CacheEvent) -> str:
    """`BlocksStored` as `blocks stored`."""
    name = type(event).__name__
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def _about(event: CacheEvent) -> str:
    from prefixcache.client.events import (
        BlocksRemoved,
        BlocksStored,
        EventsLost,
        SnapshotStarted,
    )

    match event:
        case SnapshotStarted(num_blocks):
            return f"{num_blocks:,} blocks"
        case EventsLost(number, end_number):
            return f"{end_number - number:,} events, up to {end_number - 1}"
        case BlocksStored(block_hashes=hashes, parent_hash=parent):
            after = f" after {_short(parent)}" if parent is not None else ""
            return _blocks(hashes) + after
        case BlocksRemoved(block_hashes=hashes):
            return _blocks(hashes)
    return ""


def _blocks(hashes: tuple[bytes, ...]) -> str:
    first, last = _short(hashes[0]), _short(hashes[-1])
    return first if len(hashes) == 1 else f"{first} .. {last}, {len(hashes):,} blocks"


def _short(block_hash: bytes) -> str:
    return block_hash[:_SHOWN_BYTES].hex()
