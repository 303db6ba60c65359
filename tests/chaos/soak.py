"""Part 5: clients that come and go on a pool too small for them, every hit checked, memory flat."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from pathlib import Path

from tests.chaos import lives
from tests.chaos.clients import ClientProcess, World, start_client
from tests.chaos.daemon_process import CHECKED_DAEMON, DaemonProcess, Usage
from tests.chaos.flatness import judge
from tests.chaos.load import FREE_S, check_daemon, collect, served
from tests.chaos.report import Figures
from tests.chaos.witnesses import Witnesses
from tests.support.waiting import until

CLIENTS = 8
_LIFE_S = (1.0, 5.0)
_KILLED_PART = 0.25
_MAX_CLIENTS_A_SECOND = 16
_LOOK_S = 0.1
_START_S = 120.0
_FEW_REQUESTS = 200
"""Which a slow machine may make without evicting a block."""
_SCRAPE_RATE = 0.2
_STOP_RATE, _STOP_S = 0.05, (0.1, 1.5)


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
    free_s: float = FREE_S,
) -> Figures:
    """free_s: for what clients held to be free in the end."""
    num_rows = int(seconds * _MAX_CLIENTS_A_SECOND) + CLIENTS
    witnesses = Witnesses(folder / f"{storage}.record")
    with served(
        folder,
        storage,
        rng,
        num_rows,
        *witnesses.options,
        has_tenants=has_tenants,
        program=program,
    ) as it:
        return _soak(it.world, it.daemon, witnesses, rng, seconds, free_s)


def _soak(
    world: World,
    daemon: DaemonProcess,
    witnesses: Witnesses,
    rng: random.Random,
    seconds: float,
    free_s: float,
) -> Figures:
    name = f"storage {world.storage}"
    figures = Figures("soak", clients=CLIENTS)
    before = daemon.usage()
    begin_s = time.monotonic()
    samples = _Churn(figures, world, daemon, rng, witnesses).run(seconds)
    figures.seconds = time.monotonic() - begin_s
    check_daemon(figures, daemon, free_s)
    judge(figures, name, [before, *samples, daemon.usage()])
    stats = daemon.stats()
    figures.notes.append(
        f"{name}: {stats.requests} sequences, hit rate {stats.hit_rate:.0%},"
        f" {stats.evictions} evictions, {stats.allocation_refused} refused for lack of room"
    )
    if stats.requests > _FEW_REQUESTS and not (stats.evictions and stats.hit_tokens):
        figures.problems.append("the load had no evictions, or no hits")
    witnesses.check_metrics(figures, daemon.log, stats)
    if code := daemon.end(signal.SIGTERM):
        figures.problems.append(f"the daemon's exit code was {code}")
    witnesses.check_record(figures, stats)
    return figures


class _Churn:
    """Clients that live for a while, end in one of three ways, and are replaced."""

    def __init__(
        self,
        figures: Figures,
        world: World,
        daemon: DaemonProcess,
        rng: random.Random,
        witnesses: Witnesses,
    ) -> None:
        self._figures = figures
        self._world = world
        self._daemon = daemon
        self._rng = rng
        self._witnesses = witnesses
        self._rows = iter(range(world.num_rows))
        self._running: list[ClientProcess] = []
        self._ended: list[ClientProcess] = []
        self._doomed: dict[int, float] = {}
        """When rows are to be killed."""

    def run(self, seconds: float) -> list[Usage]:
        """So long once clients are at work: the first ones take their time to start."""
        samples: list[Usage] = []
        until_s = time.monotonic() + seconds
        self._fill_up(until_s)
        until(lambda: self._world.tally().marks("steps"), _START_S)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._fill_up(until_s)
            time.sleep(_LOOK_S)
            if self._rng.random() < _STOP_RATE:
                self._stop_for_a_while(until_s)
            self._kill_doomed(time.monotonic())
            self._ended += [client for client in self._running if client.wait(0.0)]
            self._running = [client for client in self._running if not client.wait(0.0)]
            samples.append(self._daemon.usage())
            if self._rng.random() < _SCRAPE_RATE:
                self._witnesses.scrape(self._daemon.log)
        self._kill_doomed(math.inf)
        collect(self._figures, self._world, [*self._ended, *self._running], _LIFE_S[1])
        return samples

    def _fill_up(self, until_s: float) -> None:
        while len(self._running) < CLIENTS:
            self._start(until_s)

    def _start(self, until_s: float) -> None:
        now_s, row, seed = time.monotonic(), next(self._rows), self._rng.randrange(2**32)
        life_s = min(self._rng.uniform(*_LIFE_S), max(0.2, until_s - now_s))
        if self._rng.random() < _KILLED_PART:
            client = start_client(lives.load_without_end, self._world, row, seed)
            self._doomed[row] = now_s + life_s
        else:
            client = start_client(lives.load, self._world, row, seed, life_s)
        self._running.append(client)

    def _kill_doomed(self, now_s: float) -> None:
        for client in self._running:
            if client.row in self._doomed and self._doomed[client.row] <= now_s:
                del self._doomed[client.row]
                client.process.kill()
                self._figures.faults["kills"] += 1

    def _stop_for_a_while(self, until_s: float) -> None:
        """The daemon or a client does nothing for a moment, which costs nobody a session."""
        pids = [client.process.pid for client in self._running]
        pid = self._rng.choice([self._daemon.pid, self._rng.choice(pids)])
        seconds = min(self._rng.uniform(*_STOP_S), max(0.0, until_s - time.monotonic()))
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # its time was over just then
            return
        who = "the daemon" if pid == self._daemon.pid else "a client"
        self._figures.faults[f"stops of {who}"] += 1
