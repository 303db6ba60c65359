"""`prefixcache stats`: one snapshot of a daemon's counters, or a view that follows them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, AsJson, Target, Timeout, connect
from prefixcache.cli.output import Rows, make_table, print_json, print_rows, to_json
from prefixcache.sizes import format_size

if TYPE_CHECKING:
    from prefixcache.core.stats import PoolStats, TenantStats

_DEFAULT_INTERVAL_S = 2.0
_BAR_WIDTH = 30
_RATED = ("requests", "queries_tokens", "hit_tokens", "evictions")

Rates = dict[str, float]
"""Counts a second, by the name of the counter."""


@takes_credentials
def stats(
    credentials: MakeCredentials,
    interval: Annotated[
        float | None,
        typer.Argument(
            metavar="SECONDS",
            min=0.05,
            show_default=False,
            help=f"With --watch: seconds between views. (default {_DEFAULT_INTERVAL_S:g})",
        ),
    ] = None,
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Follow the counters, with rates a second, until interrupted; "
            "with --json an object a line.",
        ),
    ] = False,
) -> None:
    """Show the hit rate, the pool's fill and other counts of a daemon."""
    if interval is not None and not watch:
        raise typer.BadParameter("needs --watch", param_hint="SECONDS")
    with connect(target, timeout, credentials) as client:
        if watch:
            with suppress(KeyboardInterrupt):  # the way to end it
                _watch(client.stats, interval or _DEFAULT_INTERVAL_S, as_json)
        elif as_json:
            print_json(to_object(client.stats()))
        else:
            print_rows(make_rows(client.stats()))


def follow(
    read: Callable[[], PoolStats],
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[PoolStats, Rates | None]]:
    """Snapshots for ever, each with the rates since the one before.

    No rates with the first one, nor after a restart of the daemon, which sets the counters back.
    """
    before: PoolStats | None = None
    before_s = 0.0
    while True:
        now, now_s = read(), clock()
        rates = None
        if before is not None and now.requests >= before.requests and now_s > before_s:
            rates = {
                name: (getattr(now, name) - getattr(before, name)) / (now_s - before_s)
                for name in _RATED
            }
        yield now, rates
        before, before_s = now, now_s
        sleep(interval_s)


def _watch(read: Callable[[], PoolStats], interval_s: float, as_json: bool) -> None:
    snapshots = follow(read, interval_s)
    if as_json:
        for snapshot, rates in snapshots:
            print_json({**to_object(snapshot), "rates_per_s": rates}, on_one_line=True)
        return
    if not sys.stdout.isatty():
        for snapshot, rates in snapshots:
            print_rows(make_rows(snapshot, rates))
            typer.echo()
        return
    with Live(auto_refresh=False) as live:
        for snapshot, rates in snapshots:
            live.update(make_table(make_rows(snapshot, rates)), refresh=True)


def to_object(snapshot: PoolStats) -> dict[str, object]:
    """All counters and gauges, with the ratios that follow from them."""
    fields = to_json(snapshot)
    assert isinstance(fields, dict)
    return {**fields, "pool_usage": snapshot.pool_usage, "hit_rate": snapshot.hit_rate}


def make_rows(snapshot: PoolStats, rates: Rates | None = None) -> Rows:
    """Rows for people; with rates if there are some."""
    s = snapshot
    rows: list[tuple[str, str | Text]] = [
        ("hit rate", _ratio(s.hit_tokens, s.queries_tokens, "prompt tokens")),
        ("hit blocks", _ratio(s.hit_blocks, s.queries_blocks, "full blocks")),
        ("pool usage", _bar(s)),
        ("blocks", f"{s.num_blocks:,} of {s.block_size} tokens, {s.cached:,} cached"),
        ("  referenced", f"{s.referenced:,}"),
        ("  quarantined", f"{s.quarantined:,}"),
        ("  evictable", f"{s.evictable:,}"),
        ("  blank", f"{s.blank:,}"),
        ("sequences", f"{s.sequences:,} of {s.owners:,} owners"),
        ("sessions", f"{s.sessions:,}"),
        ("requests", f"{s.requests:,}, and {s.resumed_requests:,} resumed"),
        (
            "prefill tokens",
            f"{s.prefill_tokens_computed:,} computed, {s.prefill_tokens_cached:,} cached",
        ),
        ("evictions", f"{s.evictions:,}"),
        ("refused", f"{s.allocation_refused:,} allocations, {s.append_refused:,} appends"),
        ("expired", f"{s.expired_sequences:,} sequences, {s.expired_sessions:,} sessions"),
        ("resets", f"{s.resets:,}"),
        *([("arenas", f"{s.arenas:,}, {format_size(s.arena_bytes)}")] if s.arenas else []),
        *(_tenant_row(tenant) for tenant in s.tenants),
    ]
    if rates is not None:
        rows += [
            ("requests/s", f"{rates['requests']:,.1f}"),
            ("queried tokens/s", f"{rates['queries_tokens']:,.1f}"),
            ("hit tokens/s", f"{rates['hit_tokens']:,.1f}"),
            ("evictions/s", f"{rates['evictions']:,.1f}"),
        ]
    return rows


def _tenant_row(tenant: TenantStats) -> tuple[str, str]:
    limit = "" if tenant.max_blocks is None else f", at most {tenant.max_blocks:,}"
    row = (
        f"{tenant.held:,} held, {tenant.guaranteed_blocks:,} guaranteed{limit}; "
        f"{tenant.evictable:,} evictable, {tenant.evictions:,} evictions, "
        f"{tenant.refused:,} refused"
    )
    return f"tenant {tenant.name}", row


def _ratio(part: int, whole: int, unit: str) -> str:
    if not whole:
        return f"- (no {unit} asked for yet)"
    return f"{part / whole:.1%} ({part:,} of {whole:,} {unit})"


def _bar(snapshot: PoolStats) -> Text:
    """Blocks by state as parts of a bar."""
    text = Text()
    shown = 0
    for count, letter, style in (
        (snapshot.referenced, "#", "green"),
        (snapshot.quarantined, "!", "yellow"),
        (snapshot.evictable, "+", "cyan"),
        (snapshot.blank, ".", "dim"),
    ):
        shown += count
        width = round(_BAR_WIDTH * shown / max(snapshot.num_blocks, 1)) - len(text)
        text.append(letter * width, style=style)
    quarantined = "! quarantined, " if snapshot.quarantined else ""
    legend = f"# referenced, {quarantined}+ evictable, . blank"
    return text.append(f" {snapshot.pool_usage:.1%} ({legend})")
