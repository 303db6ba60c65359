"""Part 2: a daemon that is stopped (SIGTERM) and killed (SIGKILL) while clients are at work.

Each call ends in a reply or a status within its deadline, and nothing of an earlier boot is ever
answered for.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.chaos import lives
from tests.chaos.clients import World, start_client
from tests.chaos.daemon_process import DaemonProcess
from tests.chaos.load import check_daemon, collect, served
from tests.chaos.report import Figures
from tests.chaos.tenants import FILE

CLIENTS = 6
_UP_S = (0.2, 1.2)
_RELOAD_RATE = 0.4
_RELOAD_S = (0.0, 0.3)
_LAST_S = 1.5
"""The clients go on for so long on the last boot, which is left alone."""


def run(folder: Path, rng: random.Random, seconds: float) -> Figures:
    """Half of the time without K/V in the daemon, half with, for clients of several tenants."""
    figures = Figures("restarts", clients=CLIENTS)
    for storage in ("none", "cpu"):
        with served(folder, storage, rng, CLIENTS, has_tenants=storage == "cpu") as it:
            figures.add(_restart(it.world, it.daemon, rng, seconds / 2))
    return figures


def _restart(world: World, daemon: DaemonProcess, rng: random.Random, seconds: float) -> Figures:
    begin_s = time.monotonic()
    until_s = begin_s + seconds
    clients = [
        start_client(lives.through_restarts, world, row, rng.randrange(2**32), until_s)
        for row in range(CLIENTS)
    ]
    figures = Figures("restarts", clients=CLIENTS)
    generation, slowest_s = world.generation(), 0.0
    while time.monotonic() < until_s - _LAST_S:
        time.sleep(rng.uniform(*_UP_S))
        if rng.random() < _RELOAD_RATE:
            _reload(figures, world, daemon, rng)
        number = rng.choice((signal.SIGTERM, signal.SIGKILL))
        sent_s = time.monotonic()
        code = daemon.end(number)
        slowest_s = max(slowest_s, time.monotonic() - sent_s)
        expected = 0 if number is signal.SIGTERM else -signal.SIGKILL
        if code != expected:
            figures.problems.append(f"after {number.name} the daemon's exit code was {code}")
        figures.faults[number.name] += 1
        generation[0] += 1
        daemon.start()
    collect(figures, world, clients, max(0.0, until_s - time.monotonic()))
    figures.seconds = time.monotonic() - begin_s
    figures.notes.append(
        f"storage {world.storage}: ended {slowest_s:.2f} s after the signal at most"
    )
    check_daemon(figures, daemon)
    return figures


def _reload(figures: Figures, world: World, daemon: DaemonProcess, rng: random.Random) -> None:
    """It reads its settings again and goes on, also where there is a mistake in them."""
    rules = world.folder / FILE
    text = rules.read_text("utf-8") if world.has_tenants else None
    if text is not None:
        rules.write_text("no rules at all", "utf-8")
        daemon.signal(signal.SIGHUP)
        figures.faults["SIGHUP with bad settings"] += 1
        time.sleep(rng.uniform(*_RELOAD_S))
        rules.write_text(text, "utf-8")
    daemon.signal(signal.SIGHUP)
    figures.faults["SIGHUP"] += 1
    time.sleep(rng.uniform(*_RELOAD_S))
