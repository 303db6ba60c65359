"""Part 1: client processes that are killed with SIGKILL in every phase of every RPC.

After each batch everything that they held is gone long before their sessions would end.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

from tests.chaos import lives
from tests.chaos.clients import ClientProcess, World, start_client
from tests.chaos.daemon_process import DaemonProcess
from tests.chaos.flatness import judge
from tests.chaos.killer import PHASES
from tests.chaos.link import Kill
from tests.chaos.load import FREE_S, check_daemon, count_calls, served
from tests.chaos.report import Figures
from tests.chaos.tally import RPCS

CLIENTS = 8
FEWEST = 150
"""Kills that meet every phase of every RPC."""
_BATCH = 40
_ONLY_WITH = {"Commit": "none", "Prefill": "cpu", "Decode": "cpu"}
_WITHOUT_STREAM = ("GetServerInfo", "OpenSession", "KeepAlive")
"""Killed there, a client has no KeepAlive stream yet: its session ends by its TTL."""
_TTL_S = 60.0
_SHORT_TTL_S = 5.0
_END_S = 120.0
_LOOK_S = 0.005
_TIMED_PART = 0.25
_TIMED_S = (0.02, 0.6)


@dataclass
class _Batch:
    world: World
    daemon: DaemonProcess
    figures: Figures
    coverage: Counter[tuple[str, str]]


def run(folder: Path, rng: random.Random, num_kills: int) -> Figures:
    """Half of the kills with K/V in the daemon, half without, of clients of several tenants."""
    figures = Figures("kills", clients=CLIENTS)
    coverage: Counter[tuple[str, str]] = Counter()
    begin_s = time.monotonic()
    for storage in ("none", "cpu"):
        with served(folder, storage, rng, num_kills, has_tenants=storage == "none") as it:
            batch = _Batch(it.world, it.daemon, figures, coverage)
            _kill_all(batch, rng, num_kills // 2)
            _note_daemon(batch)
    figures.seconds = time.monotonic() - begin_s
    figures.notes.append(_coverage_table(coverage))
    missing = [f"{rpc} {phase}" for rpc in RPCS for phase in PHASES if not coverage[rpc, phase]]
    if missing:
        figures.problems.append(f"no client was killed at: {', '.join(missing)}")
    return figures


def _plans(storage: str, rng: random.Random) -> Iterator[Kill]:
    """First those of which the other storage makes the rest, then all in turn."""
    kills = [
        Kill(rpc, phase)
        for rpc in RPCS
        for phase in PHASES
        if _ONLY_WITH.get(rpc, storage) == storage
    ]
    half = int(storage == "cpu")
    first = [
        kill
        for kill in kills
        if kill.rpc in _ONLY_WITH or (RPCS.index(kill.rpc) + PHASES.index(kill.phase)) % 2 == half
    ]
    rng.shuffle(first)
    rng.shuffle(kills)
    return chain(first, cycle(kills))


def _kill_all(batch: _Batch, rng: random.Random, num_kills: int) -> None:
    plans = _plans(batch.world.storage, rng)
    rows = iter(range(num_kills))
    slowest_s, samples = 0.0, [batch.daemon.usage()]
    while some := list(islice(rows, _BATCH)):
        waiting = iter(some)
        running = [_start(batch, row, rng, plans) for row in islice(waiting, CLIENTS)]
        while running:
            time.sleep(_LOOK_S)
            for victim in running:
                victim.kill_when_due()
            for victim in [victim for victim in running if victim.has_ended()]:
                running.remove(victim)
                _count(batch, victim)
                samples.append(batch.daemon.usage())
                running += [_start(batch, row, rng, plans) for row in islice(waiting, 1)]
        slowest_s = max(slowest_s, check_daemon(batch.figures, batch.daemon))
    samples.append(batch.daemon.usage())
    name = f"storage {batch.world.storage}"
    batch.figures.notes.append(
        f"{name}: all was free {slowest_s:.2f} s after the last kill of a batch, at the latest"
    )
    judge(batch.figures, name, samples)
    _check_sessions(batch)


@dataclass
class _Victim:
    """kill: None for one that dies at any time, by our hand. due_s: when it is dead by our hand."""

    client: ClientProcess
    kill: Kill | None
    due_s: float
    hung: bool = False

    def kill_when_due(self) -> None:
        if time.monotonic() >= self.due_s:
            self.hung = self.kill is not None
            self.client.process.kill()

    def has_ended(self) -> bool:
        return self.client.wait(0.0)


def _start(batch: _Batch, row: int, rng: random.Random, plans: Iterator[Kill]) -> _Victim:
    seed, now_s = rng.randrange(2**32), time.monotonic()
    if rng.random() < _TIMED_PART:
        client = start_client(lives.load_without_end, batch.world, row, seed, _SHORT_TTL_S)
        return _Victim(client, None, now_s + rng.uniform(*_TIMED_S))
    kill = next(plans)
    ttl_s = _SHORT_TTL_S if kill.rpc in _WITHOUT_STREAM else _TTL_S
    client = start_client(lives.killed, batch.world, row, seed, kill, ttl_s)
    return _Victim(client, kill, now_s + _END_S)


def _count(batch: _Batch, victim: _Victim) -> None:
    if victim.hung:
        batch.figures.problems.append(f"a client hung and was not killed at {victim.kill}")
    batch.figures.problems += victim.client.problems()
    if victim.client.was_killed:
        batch.figures.faults["kills at a phase" if victim.kill else "kills at any time"] += 1
    where = batch.world.tally().of_row(victim.client.row).kill()
    if where is not None:
        batch.coverage[where] += 1


def _check_sessions(batch: _Batch) -> None:
    """A session that never had a stream lives for its TTL, and not much longer."""
    until_s = time.monotonic() + _SHORT_TTL_S + FREE_S
    while batch.daemon.stats().sessions and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    if count := batch.daemon.stats().sessions:
        batch.figures.problems.append(f"{count} sessions of killed clients live on")


def _note_daemon(batch: _Batch) -> None:
    for rpc, phase, count in batch.daemon.ask("kills"):
        batch.coverage[rpc, phase] += count
    count_calls(batch.figures, batch.world)


def _coverage_table(coverage: Counter[tuple[str, str]]) -> str:
    width = max(map(len, RPCS))
    lines = ["clients killed, by RPC and phase:", " " * (width + 2) + " | ".join(PHASES)]
    for rpc in RPCS:
        cells = [str(coverage[rpc, phase]).rjust(len(phase)) for phase in PHASES]
        lines.append(rpc.ljust(width + 2) + " | ".join(cells))
    return "\n    ".join(lines)
