"""The status page: an overview as one HTML document, and as JSON for programs.

The document asks for nothing besides itself: style, script and charts are in it, and its policy
allows no others. It is whole without the script, which only fetches it again; so there is one way
to draw. Texts come from the operator, never from clients, and are escaped all the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from http import HTTPStatus
from importlib.resources import files

from prefixcache.core.history import Interval
from prefixcache.core.stats import PoolStats
from prefixcache.durations import format_duration
from prefixcache.server.charts import bar, line
from prefixcache.server.metrics_http import Reply
from prefixcache.server.overview import INTERVAL_S, NUM_INTERVALS, Observer, Overview

_SPAN_S = INTERVAL_S * NUM_INTERVALS
_FILES = files("prefixcache.server")
_STYLE = (_FILES / "status_page.css").read_text("utf-8")
_SCRIPT = (_FILES / "status_page.js").read_text("utf-8")


def _source(text: str) -> str:
    """An inline part as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_source(_STYLE)}; script-src {_source(_SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)


def make_pages(observer: Observer) -> Mapping[str, Callable[[], Reply]]:
    """By path: the page, and the same as JSON."""

    def page() -> Reply:
        body = make_html(observer.overview())
        return Reply(HTTPStatus.OK, body, "text/html; charset=utf-8", HEADERS)

    def as_json() -> Reply:
        body = make_json(observer.overview())
        return Reply(HTTPStatus.OK, body, "application/json", HEADERS)

    return {"/": page, "/status.json": as_json}


def make_json(seen: Overview) -> bytes:
    """An object; `stats` is what `prefixcache stats --json` prints."""
    stats, info = seen.stats, seen.info
    document = {
        "version": info.server_version,
        "boot_id": info.boot_id.hex(),
        "model_name": info.model_name,
        "model_revision": info.model_revision,
        "device": info.device,
        "hash_algorithm": info.hash_algorithm,
        "is_serving": seen.is_serving,
        "stats": {**asdict(stats), "pool_usage": stats.pool_usage, "hit_rate": stats.hit_rate},
        "largest_sequences": [asdict(row) for row in seen.sequences],
        "sessions": [asdict(row) for row in seen.sessions],
        "history": [asdict(interval) for interval in seen.history],
    }
    return json.dumps(document).encode()


def make_html(seen: Overview) -> bytes:
    """The whole document, in UTF-8."""
    parts = (
        _about(seen),
        _pool(seen.stats),
        *_charts(seen),
        _sequences(seen),
        _sessions(seen),
        _calls(seen.stats),
        _tenants(seen.stats),
        _counters(seen.stats),
    )
    document = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<title>prefixcache</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        "<header><h1>prefixcache</h1></header>\n"
        '<p id="lost" role="status" hidden>No answer since <span id="since"></span>: '
        "what follows is old.</p>\n"
        f"<main>\n{''.join(parts)}</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )
    return document.encode()


def _about(seen: Overview) -> str:
    info = seen.info
    model = " ".join(filter(None, (info.model_name, info.model_revision)))
    facts = [
        f"up {format_duration(seen.stats.uptime_s)}",
        escape(model) or "no model named",
        "no K/V here" if info.device == "none" else f"K/V on {escape(info.device)}",
        escape(info.hash_algorithm),
        f"version {escape(info.server_version)}",
    ]
    state, kind = ("Serving", "") if seen.is_serving else ("Not serving", " away")
    return (
        f'<p class="about quiet"><span class="state{kind}">{state}</span>, {", ".join(facts)}</p>\n'
    )


def _pool(stats: PoolStats) -> str:
    parts = ("referenced", "quarantined", "evictable", "blank")
    counts = [(name, getattr(stats, name)) for name in parts]
    label = ", ".join(f"{count} {name}" for name, count in counts)
    keys = "".join(
        f'<li><span class="key {name}"></span>{_data(name, count)} {name} '
        f"({_percent(count, stats.num_blocks)})</li>"
        for name, count in counts
    )
    return _section(
        f"Pool: {_data('num_blocks', stats.num_blocks)} blocks of "
        f"{_data('block_size', stats.block_size)} tokens",
        f'<div class="bar">{bar(f"Blocks: {label}", counts)}</div><ul class="legend">{keys}</ul>',
    )


def _charts(seen: Overview) -> Iterable[str]:
    stats, history = seen.stats, seen.history
    rate = _percent(stats.hit_tokens, stats.queries_tokens)
    yield _chart(
        "Hit rate",
        rate,
        f"{_data('hit_tokens', stats.hit_tokens)} of "
        f"{_data('queries_tokens', stats.queries_tokens)} tokens since the start",
        seen,
        lambda interval: interval.hit_rate,
        is_part=True,
    )
    last = history[-1] if history else None
    yield _chart(
        "Evictions a second",
        _rate(last.evictions_per_s if last else None),
        f"{_data('evictions', stats.evictions)} since the start",
        seen,
        lambda interval: interval.evictions_per_s,
    )
    num_calls = sum(call.ended for call in stats.calls)
    yield _chart(
        "RPCs a second",
        _rate(last.calls_per_s if last else None),
        f"{num_calls:,} since the start; {_data('requests', stats.requests)} sequences",
        seen,
        lambda interval: interval.calls_per_s,
    )


def _chart(
    title: str,
    now: str,
    note: str,
    seen: Overview,
    value_of: Callable[[Interval], float | None],
    *,
    is_part: bool = False,
) -> str:
    """is_part: values are 0 to 1, of a whole."""
    start_s = seen.stats.uptime_s - _SPAN_S
    values = [(interval.end_s - start_s, value_of(interval)) for interval in seen.history]
    points = [(x, y) for x, y in values if x >= 0]
    highest = 1.0 if is_part else max([y for _, y in points if y is not None] + [0.0])
    shown = f"{highest:.0%}" if is_part else f"{highest:,.1f}"
    minutes = f"{_SPAN_S / 60:.0f} min"
    drawing = line(f"{title}, the last {minutes}, up to {shown}", points, _SPAN_S, highest or 1.0)
    return _section(
        title,
        f'<p class="big">{now}</p><p class="quiet">{note}</p>'
        f'<div class="chart"><div class="axis"><span>{shown}</span></div>{drawing}'
        f'<div class="axis"><span>{minutes} ago</span><span>now</span></div></div>',
        "third",
    )


def _sequences(seen: Overview) -> str:
    rows = [
        (
            row.owner_digest,
            *_tenant_cell(seen, row.tenant),
            f"{row.num_blocks:,}",
            f"{row.num_tokens:,}",
            f"{row.num_computed_tokens:,}",
            f"{row.num_cached_tokens:,}",
            format_duration(row.age_s),
        )
        for row in seen.sequences
    ]
    head = ("owner", *_tenant_head(seen), "blocks", "tokens", "computed", "cached", "age")
    total = _data("sequences", seen.stats.sequences)
    title = f"Largest of {total} sequences, {_data('owners', seen.stats.owners)} owners"
    return _section(title, _table("Largest sequences", head, rows, "No sequences."))


def _sessions(seen: Overview) -> str:
    rows = [
        (
            row.digest,
            *_tenant_cell(seen, row.tenant),
            f"{row.num_sequences:,}",
            "yes" if row.is_connected else "no",
            f"{row.left_s:,.1f} s",
            format_duration(row.age_s),
        )
        for row in seen.sessions
    ]
    head = ("session", *_tenant_head(seen), "sequences", "connected", "ends in", "age")
    title = f"Sessions: {_data('sessions', seen.stats.sessions)}"
    return _section(title, _table("Sessions, oldest first", head, rows, "No sessions."), "half")


def _calls(stats: PoolStats) -> str:
    rows = [
        (
            call.method,
            _data(f"calls_{call.method}", call.ended),
            f"{call.failed:,}",
            f"{1000 * call.duration_s / call.ended:,.2f} ms",
        )
        for call in stats.calls
    ]
    head = ("RPC", "calls", "failed", "mean time")
    return _section("RPCs", _table("Calls by RPC", head, rows, "No calls yet."), "half")


def _tenants(stats: PoolStats) -> str:
    if not stats.tenants:
        return ""
    rows = [
        (
            escape(tenant.name or "-"),
            f"{tenant.held:,}",
            f"{tenant.guaranteed_blocks:,}",
            "-" if tenant.max_blocks is None else f"{tenant.max_blocks:,}",
            f"{tenant.evictable:,}",
            f"{tenant.evictions:,}",
            f"{tenant.refused:,}",
        )
        for tenant in stats.tenants
    ]
    head = ("tenant", "held", "guaranteed", "at most", "evictable", "evictions", "refused")
    return _section("Tenants, in blocks", _table("Tenants", head, rows, ""))


def _counters(stats: PoolStats) -> str:
    names = (
        *("cached", "slots_written", "queries_blocks", "hit_blocks", "resumed_requests"),
        *("resumed_queries_tokens", "resumed_hit_tokens", "prefill_tokens_computed"),
        *("prefill_tokens_cached", "allocation_refused", "append_refused", "resets"),
        *("expired_sequences", "expired_sessions", "attached_readers", "attached_writers"),
        *("arenas", "arena_bytes"),
    )
    items = "".join(
        f"<li><span>{name.replace('_', ' ')}</span>{_data(name, getattr(stats, name))}</li>"
        for name in names
    )
    return _section("More counts", f'<ul class="counts">{items}</ul>')


def _tenant_head(seen: Overview) -> tuple[str, ...]:
    return ("tenant",) if seen.stats.tenants else ()


def _tenant_cell(seen: Overview, tenant: str) -> tuple[str, ...]:
    return (escape(tenant or "-"),) if seen.stats.tenants else ()


def _table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    """Cells are HTML."""
    if not rows:
        return f'<p class="quiet">{empty}</p>'
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><td class="name">{row[0]}</td>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">'
        f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _section(title: str, content: str, width: str = "") -> str:
    """width: "third" or "half" of a wide window, else all of it. title, content: HTML."""
    heading = f"<h2>{title}</h2>" if title else ""
    return f'<section class="{width or "whole"}">{heading}{content}</section>\n'


def _data(name: str, value: int) -> str:
    """A number for people, which programs find by its name."""
    return f'<data id="{name}" value="{value}">{value:,}</data>'


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
