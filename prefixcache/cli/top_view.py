"""What `prefixcache top` shows: one text, cut to the terminal's size.

Pure functions of what was read; the live view and `--once` show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.text import Text

from prefixcache.core.history import Interval
from prefixcache.core.stats import CallStats, PoolStats
from prefixcache.durations import format_duration
from prefixcache.types import SequenceOrder

if TYPE_CHECKING:
    from prefixcache.client.results import SequenceInfo, SessionInfo

ORDERS = {
    SequenceOrder.MOST_BLOCKS: "by blocks",
    SequenceOrder.NEWEST: "newest first",
    SequenceOrder.OLDEST: "oldest first",
}
"""In the order in which a key goes through them."""
NUM_ROWS = 10
"""Of each table, where the height is not limited."""
_NAME_WIDTH = 11
_SPARKS = "▁▂▃▄▅▆▇█"
_HEAD = "bold"
_QUIET = "dim"
_ALARM = "bold red"


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a daemon. sequences: the first ones in `order`."""

    stats: PoolStats
    sequences: Sequence[SequenceInfo]
    sessions: Sequence[SessionInfo]
    order: SequenceOrder


@dataclass(frozen=True, slots=True)
class Screen:
    """All that is shown. Without `interval_s` it is a snapshot, without rates.

    before: the counters of the look before, None if there was none, or the daemon has restarted.
    problem: why the last attempt failed; empty if it did not. silent_s: since the last answer.
    """

    target: str
    seen: Seen
    before: PoolStats | None = None
    history: Sequence[Interval] = ()
    interval_s: float | None = None
    is_paused: bool = False
    problem: str = ""
    silent_s: float = 0.0


def render(screen: Screen, width: int, height: int | None = None) -> list[Text]:
    """Lines of at most `width` cells. height: of the terminal; None for no limit."""
    stats = screen.seen.stats
    lines = [_title(screen), *_pool(stats, width), *_trends(screen, width), Text()]
    keys = [_keys(screen)] if screen.interval_s is not None else []
    tables = [_sequences(screen.seen), _sessions(screen.seen), _calls(screen)]
    room = None if height is None else height - len(lines) - len(keys) - len(tables)
    shares = _shares([len(table) - 1 for table in tables], room)
    for table, num_rows in zip(tables, shares, strict=True):
        lines += table[: num_rows + 1]
        if height is None:
            lines.append(Text())
    if height is None:
        lines.pop()
    else:
        lines = lines[: height - len(keys)]
        lines += [Text()] * (height - len(keys) - len(lines))
    lines += keys
    for line in lines:
        line.truncate(width)
    return lines


def _shares(wanted: Sequence[int], room: int | None) -> list[int]:
    """Rows for each table: a third of the room, and what others leave goes to the first ones."""
    if room is None:
        return [min(rows, NUM_ROWS) for rows in wanted]
    shares = [min(rows, max(0, room) // len(wanted)) for rows in wanted]
    for index, rows in enumerate(wanted):
        shares[index] += max(0, min(rows - shares[index], room - sum(shares)))
    return shares


def _title(screen: Screen) -> Text:
    """What is cut off in a narrow terminal is at the end."""
    text = Text().append("prefixcache", _HEAD)
    if screen.problem or _is_silent(screen):
        text.append(f"  NO ANSWER for {format_duration(screen.silent_s)}", _ALARM)
    elif screen.is_paused:
        text.append("  PAUSED", _HEAD)
    text.append(f"  up {format_duration(screen.seen.stats.uptime_s)}")
    if screen.interval_s is not None:
        text.append(f"  every {screen.interval_s:g} s")
    return text.append(f"  {screen.target}")


def _is_silent(screen: Screen) -> bool:
    """Whether an answer is overdue."""
    if screen.interval_s is None or screen.is_paused:
        return False
    return screen.silent_s > 2 * screen.interval_s + 1


def _pool(stats: PoolStats, width: int) -> Iterable[Text]:
    bar = _row("pool", "")
    room = max(10, width - _NAME_WIDTH)
    shown = drawn = 0
    for count, letter, style in (
        (stats.referenced, "#", "green"),
        (stats.quarantined, "!", "yellow"),
        (stats.evictable, "+", "cyan"),
        (stats.blank, ".", _QUIET),
    ):
        shown += count
        end = round(room * shown / max(stats.num_blocks, 1))
        bar.append(letter * (end - drawn), style)
        drawn = end
    yield bar
    quarantined = f"{stats.quarantined:,} ! quarantined, " if stats.quarantined else ""
    yield _row(
        "",
        f"{_percent(stats.referenced, stats.num_blocks)} of {stats.num_blocks:,} blocks: "
        f"{stats.referenced:,} # referenced, {quarantined}{stats.evictable:,} + evictable, "
        f"{stats.blank:,} . blank",
    )


def _trends(screen: Screen, width: int) -> Iterable[Text]:
    stats, history = screen.seen.stats, screen.history
    num_calls = sum(call.ended for call in stats.calls)
    yield _trend(
        "hit rate",
        _percent(stats.hit_tokens, stats.queries_tokens),
        [interval.hit_rate for interval in history],
        lambda rate: f"{rate:.1%} now",
        width,
        highest=1.0,
    )
    for name, total, values in (
        ("evictions", stats.evictions, [interval.evictions_per_s for interval in history]),
        ("requests", stats.requests, [interval.requests_per_s for interval in history]),
        ("RPCs", num_calls, [interval.calls_per_s for interval in history]),
    ):
        yield _trend(name, f"{total:,}", values, lambda rate: f"{rate:,.1f}/s", width)
    refused = f"{stats.allocation_refused:,} allocations, {stats.append_refused:,} appends"
    expired = f"{stats.expired_sequences:,} sequences, {stats.expired_sessions:,} sessions"
    yield _row("refused", f"{refused}; expired {expired}")


def _trend(
    name: str,
    total: str,
    values: Sequence[float | None],
    show: Callable[[float], str],
    width: int,
    highest: float | None = None,
) -> Text:
    """A total, its last rate, and a line of them. highest: None for the largest that is shown."""
    line = _row(name, f"{total:>14}")
    if values:
        last = values[-1]
        line.append(f"  {'-' if last is None else show(last):>12}  ")
        shown = values[-max(1, width - len(line)) :]
        largest = highest or max((value for value in shown if value is not None), default=0.0)
        line.append(_sparkline(shown, largest), "cyan")
    return line


def _sparkline(values: Iterable[float | None], highest: float) -> str:
    top = len(_SPARKS) - 1
    return "".join(
        " " if value is None else _SPARKS[round(top * value / highest) if highest else 0]
        for value in values
    )


def _sequences(seen: Seen) -> list[Text]:
    title = f"{seen.stats.sequences:,} SEQUENCES"
    columns = (("BLOCKS", 8), ("TOKENS", 9), ("COMPUTED", 9), ("CACHED", 9), ("AGE", 11))
    lines = [_table_row(title, ORDERS[seen.order], columns, _HEAD)]
    for info in seen.sequences:
        counts = (info.num_blocks, info.num_tokens, info.num_computed_tokens)
        cells = [f"{count:,}" for count in (*counts, info.num_cached_tokens)]
        cells.append(format_duration(info.age_s))
        widths = (width for _, width in columns)
        name = _client(info.client_name, info.tenant)
        lines.append(_table_row(info.owner_digest, name, tuple(zip(cells, widths, strict=True))))
    return lines


def _sessions(seen: Seen) -> list[Text]:
    title = f"{seen.stats.sessions:,} SESSIONS"
    columns = (("SEQUENCES", 10), ("CONNECTED", 10), ("ENDS IN", 12), ("AGE", 14))
    lines = [_table_row(title, "", columns, _HEAD)]
    for info in sorted(seen.sessions, key=lambda info: -info.num_sequences):
        cells = (
            f"{info.num_sequences:,}",
            "yes" if info.is_connected else "no",
            f"{info.left_s:,.1f} s",
            format_duration(info.age_s),
        )
        widths = (width for _, width in columns)
        name = _client(info.client_name, info.tenant)
        lines.append(_table_row(info.owner_digest, name, tuple(zip(cells, widths, strict=True))))
    return lines


def _calls(screen: Screen) -> list[Text]:
    """Mean times are of the calls since the look before, or of all if there were none."""
    stats, before = screen.seen.stats, screen.before
    columns = [("CALLS", 12), ("FAILED", 9), ("MEAN TIME", 15)]
    if screen.interval_s is not None:
        columns.insert(1, ("A SECOND", 10))
    lines = [_table_row("RPCS", "", columns, _HEAD)]
    earlier = {call.method: call for call in before.calls} if before is not None else {}
    seconds = stats.uptime_s - before.uptime_s if before is not None else 0.0
    for call in sorted(stats.calls, key=lambda call: (-call.ended, call.method)):
        old = earlier.get(call.method, CallStats(call.method, 0, 0, 0.0))
        num_new, new_s = call.ended - old.ended, call.duration_s - old.duration_s
        mean_s = new_s / num_new if num_new else call.duration_s / call.ended
        cells = [f"{call.ended:,}", f"{call.failed:,}", f"{1000 * mean_s:,.3f} ms"]
        if screen.interval_s is not None:
            cells.insert(1, f"{num_new / seconds:,.1f}" if seconds > 0 else "-")
        widths = (width for _, width in columns)
        style = "red" if call.failed > old.failed and before is not None else ""
        lines.append(_table_row(call.method, "", tuple(zip(cells, widths, strict=True)), style))
    return lines


def _keys(screen: Screen) -> Text:
    resume = "resume" if screen.is_paused else "pause"
    keys = f"q quit   s sort ({ORDERS[screen.seen.order]})   p {resume}"
    text = Text().append(keys, _QUIET)
    return text.append(f"   {screen.problem}", _ALARM) if screen.problem else text


def _table_row(first: str, second: str, cells: Sequence[tuple[str, int]], style: str = "") -> Text:
    """Two columns of names and the cells, as (text, width)."""
    text = f"{set_cell_size(first, 17)} {set_cell_size(second, 13)}"
    return Text(text + "".join(f"{cell:>{width}}" for cell, width in cells), style)


def _row(name: str, value: str) -> Text:
    return Text().append(f"{name:<{_NAME_WIDTH}}", _HEAD).append(value)


def _client(name: str, tenant: str) -> str:
    """What a client calls itself, without what would move a terminal's cursor, and its tenant."""
    text = f"{tenant}/{name}" if tenant else name
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "-"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
