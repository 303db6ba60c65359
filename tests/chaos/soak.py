"""Part 5: clients that come and go on a pool too small for them, every hit checked, memory flat."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.chaos import lives
from tests.chaos.clients import ClientProcess, World, start_client
from tests.chaos.daemon_process import CHECKED_DAEMON, DaemonProcess, Usage
from tests.chaos.flatness import judge
from tests.chaos.load import check_daemon, collect, served
from tests.chaos.report import Figures

CLIENTS = 8
_LIFE_S = (1.0, 5.0)
_KILLED_PART = 0.25
_MAX_CLIENTS_A_SECOND = 16
_LOOK_S = 0.1


def run(folder: Path, rng: random.Random, seconds: float) -> Figures:
    """Most of the time with K/V in the daemon, for clients of several tenants, the rest without."""
    figures = Figures("soak", clients=CLIENTS)
    for storage, part in (("cpu", 0.7), ("none", 0.3)):
        figures.add(soak(folder, storage, rng, seconds * part, has_tenants=storage == "cpu"))
    return figures


def soak(
    folder: Path,
    storage: str,
    rng: random.Random,
    seconds: float,
    *,
    has_tenants: bool = False,
    program: str = CHECKED_DAEMON,
) -> Figures:
    num_rows = int(seconds * _MAX_CLIENTS_A_SECOND) + CLIENTS
    with served(folder, storage, rng, num_rows, has_tenants=has_tenants, program=program) as it:
        return _soak(it.world, it.daemon, rng, seconds)


def _soak(world: World, daemon: DaemonProcess, rng: random.Random, seconds: float) -> Figures:
    name = f"storage {world.storage}"
    figures = Figures("soak", clients=CLIENTS)
    before = daemon.usage()
    begin_s = time.monotonic()
    samples = _churn(figures, world, daemon, rng, begin_s + seconds)
    figures.seconds = time.monotonic() - begin_s
    check_daemon(figures, daemon)
    judge(figures, name, [before, *samples, daemon.usage()])
    stats = daemon.stats()
    figures.notes.append(
        f"{name}: {stats.requests} sequences, hit rate {stats.hit_rate:.0%},"
        f" {stats.evictions} evictions, {stats.allocation_refused} refused for lack of room"
    )
    if not stats.evictions or not stats.hit_tokens:
        figures.problems.append("the load had no evictions, or no hits")
    return figures


def _churn(
    figures: Figures, world: World, daemon: DaemonProcess, rng: random.Random, until_s: float
) -> list[Usage]:
    rows = iter(range(world.num_rows))
    running: list[ClientProcess] = []
    ended: list[ClientProcess] = []
    doomed: dict[int, float] = {}
    samples: list[Usage] = []
    while time.monotonic() < until_s:
        while len(running) < CLIENTS:
            row, life_s = next(rows), rng.uniform(*_LIFE_S)
            life_s = min(life_s, max(0.2, until_s - time.monotonic()))
            seed = rng.randrange(2**32)
            if rng.random() < _KILLED_PART:
                running.append(start_client(lives.load_without_end, world, row, seed))
                doomed[row] = time.monotonic() + life_s
            else:
                running.append(start_client(lives.load, world, row, seed, life_s))
        time.sleep(_LOOK_S)
        _kill_doomed(figures, running, doomed)
        ended += [client for client in running if client.wait(0.0)]
        running = [client for client in running if client.process.exitcode is None]
        samples.append(daemon.usage())
    for row in doomed:
        doomed[row] = 0.0
    _kill_doomed(figures, running, doomed)
    collect(figures, world, [*ended, *running], _LIFE_S[1])
    return samples


def _kill_doomed(figures: Figures, running: list[ClientProcess], doomed: dict[int, float]) -> None:
    now_s = time.monotonic()
    for client in running:
        if doomed.get(client.row, now_s + 1.0) <= now_s:
            del doomed[client.row]
            client.process.kill()
            figures.faults["kills"] += 1
