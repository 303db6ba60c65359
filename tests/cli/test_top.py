"""`prefixcache top`: a snapshot, the live view's keys and sizes, a daemon that comes and goes."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from prefixcache.cli.top_app import TopApp
from prefixcache.cli.top_view import Screen, Seen, render
from prefixcache.cli.top_watch import Watch
from prefixcache.client import Client
from prefixcache.client.results import SequenceInfo, SessionInfo
from prefixcache.core.history import Interval
from prefixcache.core.stats import CallStats, PoolStats
from prefixcache.errors import UnavailableError
from prefixcache.server.daemon import CacheOptions
from prefixcache.types import SequenceId, SequenceOrder
from tests.support.command_line import output_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.program import PROGRAM, serving
from tests.support.waiting import WAIT_S

NUM_BLOCKS, BLOCK_SIZE = 16, 4
ESCAPE = "\x1b"


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE)) as running:
        yield running


@pytest.fixture
def client(running: RunningDaemon) -> Iterator[Client]:
    """Has a cached prompt, and two live sequences of 3 and 1 blocks."""
    with Client(running.target, client_name="engine 1") as client:
        with client.sequence(range(9)) as sequence:
            sequence.commit(9)
        client.sequence(range(12))
        client.sequence([1])
        yield client


def info(number: int, *, name: str = "engine", tenant: str = "") -> SequenceInfo:
    return SequenceInfo(SequenceId(number), f"{number:016x}", 100, 90, 80, 7, 3.0, name, tenant)


def screen(num_rows: int = 30, **changes: Any) -> Screen:
    """With many rows of everything, or as few as asked for."""
    counts = dict.fromkeys(PoolStats.__slots__, 0)
    calls = tuple(CallStats(f"Rpc{n}", 100 - n, n, 1.0) for n in range(num_rows))
    stats = PoolStats(
        **counts
        | {"num_blocks": 100, "referenced": 50, "evictable": 30, "blank": 20}
        | {"tenants": (), "calls": calls, "uptime_s": 100.0, "queries_tokens": 4, "hit_tokens": 3}
    )
    sessions = [
        SessionInfo(f"{n:016x}", "engine", 60.0, 59.0, True, n, 5.0, "") for n in range(num_rows)
    ]
    seen = Seen(stats, [info(n) for n in range(num_rows)], sessions, SequenceOrder.MOST_BLOCKS)
    return replace(Screen("unix:/run/x.sock", seen, interval_s=2.0), **changes)


# ---- a snapshot


def test_a_snapshot_is_plain_text_with_the_numbers_of_get_stats(
    running: RunningDaemon, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "top", "--once", "--target", running.target)
    stats = client.stats()
    lines = text.splitlines()
    assert text.isascii() and ESCAPE not in text
    assert all(len(line) <= 80 for line in lines)
    assert re.fullmatch(rf"prefixcache  up [\d.]+ s  {re.escape(running.target)}", lines[0])
    assert (
        lines[2].split()
        == (
            f"{stats.pool_usage:.1%} of 16 blocks: {stats.referenced} # referenced, "
            f"{stats.evictable} + evictable, {stats.blank} . blank"
        ).split()
    )
    assert f"hit rate   {stats.hit_rate:>14.1%}" in lines
    assert f"requests   {stats.requests:>14}" in lines
    rows = [line.split() for line in lines]
    assert ["2", "SEQUENCES", "by", "blocks"] in [row[:4] for row in rows]
    assert ["engine", "1", "3", "12"] in [row[1:5] for row in rows]
    assert ["1", "SESSIONS"] in [row[:2] for row in rows]
    (allocate,) = [call for call in stats.calls if call.method == "Allocate"]
    assert ["Allocate", str(allocate.ended), "0"] in [row[:3] for row in rows]


def test_a_snapshot_needs_no_textual(running: RunningDaemon) -> None:
    program = (
        "import sys; sys.modules['textual'] = None; from prefixcache.cli import main; "
        f"main(['top', '--once', '--target', {running.target!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "0 SEQUENCES" in done.stdout


def test_without_textual_the_way_to_it_is_said(
    running: RunningDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    for name in [name for name in sys.modules if name.startswith("textual.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "prefixcache.cli.top_app")
    error = output_of(capsys, "top", "--target", running.target, code=1)
    assert error.count("\n") == 1
    assert "pip install 'prefixcache[top]'" in error and "--once" in error


@pytest.mark.parametrize("options", [(), ("--once",)])
def test_a_daemon_that_is_not_there_is_named(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = f"unix:{tmp_path}/none.sock"
    error = output_of(capsys, "top", *options, "--timeout", "60", "--target", target, code=1)
    assert target in error and error.count("\n") == 1


# ---- what is drawn


@pytest.mark.parametrize("num_rows", [0, 1, 30])
@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12), (80, 9), (20, 3), (1, 1)])
def test_every_size_is_filled_and_not_exceeded(size: tuple[int, int], num_rows: int) -> None:
    width, height = size
    lines = render(screen(num_rows), width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines)


def test_at_80_by_24_each_table_has_rows_and_the_keys_are_at_the_end() -> None:
    lines = [line.plain for line in render(screen(), 80, 24)]
    heads = [next(i for i, line in enumerate(lines) if head in line) for head in TABLES]
    assert heads == sorted(heads)
    assert all(after - before >= 4 for before, after in zip(heads, [*heads[1:], 23], strict=True))
    assert lines[-1].startswith("q quit   s sort (by blocks)   p pause")


TABLES = ("SEQUENCES", "SESSIONS", "RPCS")


def test_room_that_a_table_does_not_need_is_the_others() -> None:
    few = screen()
    few = replace(few, seen=replace(few.seen, sessions=[]))
    lines = [line.plain for line in render(few, 80, 24)]
    assert sum(line.startswith("0000") for line in lines) == 8
    assert sum(line.startswith("Rpc") for line in lines) == 3


def test_what_a_client_calls_itself_cannot_move_the_cursor() -> None:
    shown = screen()
    names = ("\x1b[2Jevil", "a\nb", "\u202eabc", "宽字符客户端名字很长")
    rows = [info(number, name=name) for number, name in enumerate(names)]
    lines = render(replace(shown, seen=replace(shown.seen, sequences=rows)), 80, 40)
    assert len(lines) == 40
    assert all(line.plain.isprintable() and line.cell_len <= 80 for line in lines)
    assert any("?[2Jevil" in line.plain for line in lines)


def test_quarantined_blocks_are_shown_if_there_are_any() -> None:
    shown = screen()
    stats = replace(shown.seen.stats, blank=10, quarantined=10)
    lines = render(replace(shown, seen=replace(shown.seen, stats=stats)), 100, 24)
    bar, parts = (line.plain for line in lines[1:3])
    assert re.search(r"#+!+\++\.+", bar)
    assert "50 # referenced, 10 ! quarantined, 30 + evictable, 10 . blank" in parts


def test_rates_and_their_course_are_shown() -> None:
    rates = (0.0, None, 0.5, 1.0)
    history = [Interval(n, n + 1.0, 5, rate, 4.0, 2.5, 10.0 * n) for n, rate in enumerate(rates)]
    lines = [line.plain for line in render(screen(history=history), 80, 24)]
    assert any(re.search(r"hit rate +75\.0% +100\.0% now  ▁ ▅█", line) for line in lines)
    assert any(re.search(r"evictions +0 +4\.0/s  ████", line) for line in lines)
    assert any(re.search(r"RPCs .* 30\.0/s  ▁▃▆█", line) for line in lines)


def test_calls_have_the_rate_and_the_mean_time_since_the_look_before() -> None:
    shown = screen(1)
    before = replace(shown.seen.stats, uptime_s=98.0, calls=(CallStats("Rpc0", 60, 0, 0.8),))
    lines = [line.plain for line in render(replace(shown, before=before), 80, 24)]
    (row,) = [line.split() for line in lines if line.startswith("Rpc0")]
    assert row == ["Rpc0", "100", "20.0", "0", "5.000", "ms"]


# ---- live


class Live:
    """The running view, and a pilot of it."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    @property
    def lines(self) -> list[str]:
        return self.app.text.plain.splitlines()

    async def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.app.text.plain
            await self.pilot.pause(0.01)

    def shows(self, text: str) -> bool:
        return text in self.app.text.plain


@asynccontextmanager
async def live(
    target: str, size: tuple[int, int] = (80, 24), interval_s: float = 0.05
) -> AsyncIterator[Live]:
    watch = Watch(target, lambda: Client(target, timeout_s=WAIT_S), interval_s)
    first = watch.look(SequenceOrder.MOST_BLOCKS, 10)
    app = TopApp(watch, first, interval_s, with_colours=True)
    async with app.run_test(size=size) as pilot:
        yield Live(app, pilot)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_it_follows_the_daemon(running: RunningDaemon, client: Client) -> None:
    async def check() -> None:
        async with live(running.target) as view:
            assert view.shows("2 SEQUENCES")
            more = client.sequence(range(20))
            await view.until(lambda: view.shows("3 SEQUENCES") and view.shows(" now "))
            more.free()
            await view.until(lambda: view.shows("2 SEQUENCES"))
            await view.until(lambda: re.search(r"GetStats +\d+ +\d[\d,.]* ", view.app.text.plain))

    run(check())


def test_keys_sort_and_pause(running: RunningDaemon, client: Client) -> None:
    def lengths(view: Live) -> list[str]:
        head = next(i for i, line in enumerate(view.lines) if "SEQUENCES" in line)
        return [line.split()[3] for line in view.lines[head + 1 : head + 3]]

    def num_calls() -> int:
        return running.server.call_counts["GetStats"].read().durations.count

    async def check() -> None:
        async with live(running.target) as view:
            assert lengths(view) == ["3", "1"]
            await view.pilot.press("s")
            await view.until(lambda: view.shows("s sort (newest first)"))
            assert lengths(view) == ["1", "3"]
            await view.pilot.press("s", "s")
            await view.until(lambda: view.shows("s sort (by blocks)"))

            await view.pilot.press("p")
            await view.until(lambda: view.shows("PAUSED"))
            await view.app.workers.wait_for_complete()
            num_looks = num_calls()
            await view.pilot.pause(0.3)  # six intervals
            assert num_calls() == num_looks
            await view.pilot.press("p")
            await view.until(lambda: not view.shows("PAUSED") and num_calls() > num_looks)

    run(check())


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_a_key_ends_it(running: RunningDaemon, key: str) -> None:
    async def check() -> None:
        async with live(running.target) as view:
            await view.pilot.press(key)
            await view.until(lambda: not view.app.is_running)
            assert view.app.return_code == 0

    run(check())


def test_it_fills_the_terminal_after_a_resize(running: RunningDaemon, client: Client) -> None:
    async def check() -> None:
        async with live(running.target) as view:
            for width, height in ((120, 40), (50, 12), (80, 24)):
                await view.pilot.resize_terminal(width, height)
                await view.until(lambda size=(width, height): view.app.size == size)
                assert len(view.lines) == height
                assert max(map(len, view.lines)) <= width

    run(check())


def test_a_daemon_that_goes_away_is_said_and_one_that_comes_back_is_shown(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/prefixcache.sock"

    async def check() -> None:
        with serving(tmp_path, "--storage", "none", "--num-blocks", "100") as daemon:
            async with live(target) as view:
                assert view.shows("of 100 blocks")
                daemon.kill()
                daemon.wait()
                await view.until(lambda: view.shows("NO ANSWER for "))
                assert view.shows("of 100 blocks")
                # Another layout too: another block size.
                other = ("--num-blocks", "200", "--block-size", "32")
                with serving(tmp_path, "--storage", "none", *other):
                    await view.until(lambda: view.shows("of 200 blocks"))
                    await view.until(lambda: not view.shows("NO ANSWER"))

    run(check())


def test_a_daemon_that_does_not_answer_is_said_while_it_is_waited_for() -> None:
    shown = screen(silent_s=9.0)
    assert "NO ANSWER for 9.0 s" in render(shown, 80, 24)[0].plain
    assert "NO ANSWER" not in render(replace(shown, silent_s=3.0), 200, 24)[0].plain
    assert "NO ANSWER" not in render(replace(shown, is_paused=True), 200, 24)[0].plain


def test_the_first_look_fails_as_a_call_does(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/none.sock"
    watch = Watch(target, lambda: Client(target, timeout_s=WAIT_S), 1.0)
    with pytest.raises(UnavailableError):
        watch.look(SequenceOrder.NEWEST, 1)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_is_obeyed(running: RunningDaemon, client: Client, no_color: str) -> None:
    """In a terminal: only the codes for its own colours are sent."""
    environ = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_color}
    environ |= {"COLUMNS": "80", "LINES": "24"}
    command = [*PROGRAM, "top", "0.2", "--target", running.target]
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        command, stdin=other_end, stdout=other_end, stderr=other_end, env=environ
    )
    os.close(other_end)
    sent = b""
    try:
        while b"q quit" not in sent:
            sent += os.read(terminal, 2**16)
        os.write(terminal, b"q")
        while part := os.read(terminal, 2**16):
            sent += part
    except OSError:  # the terminal's other end is closed: it has quit
        pass
    finally:
        os.close(terminal)
    assert process.wait(WAIT_S) == 0
    codes = {code for text in re.findall(rb"\x1b\[([\d;]*)m", sent) for code in text.split(b";")}
    assert (codes <= {b"", b"0", b"39", b"49"}) == bool(no_color), codes
