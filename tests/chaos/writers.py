"""Part 2: processes that write K/V into the daemon's memory are killed and stopped in their writes.

Some die by SIGKILL at any time. Some stand still until their sessions are over, while others take
whatever blocks are free, and then go on with the write that they were in. Whatever they do, a block
that is committed has the K/V of its tokens, and keeps them: a hash stands for the same digest of
K/V as long as the daemon lives. What stopped writers had not committed is quarantined until they
have ended.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.chaos import attached
from tests.chaos.clients import ClientProcess, World, start_client
from tests.chaos.daemon_process import CHECKED_DAEMON, DaemonProcess
from tests.chaos.flatness import judge
from tests.chaos.load import check_daemon, count_calls, served
from tests.chaos.report import Figures

CLIENTS = 5
FEWEST = 20
_TTL_S = 1.0
_STALL_S = _TTL_S + 0.5
"""Longer than a session lives without a beat."""
STALL_EVERY = 3
"""Writers; the rest is killed without having been stopped."""
_WRITES_S = (0.02, 0.4)
"""From a writer's first step to its fault."""
_GOES_ON_S = 0.25
_START_S = 120.0
_QUARANTINE_S = 20.0
_LOOK_S = 0.005


@dataclass
class _Victim:
    """due_s: when the next thing is done to it; None until it writes.

    stalls: it is stopped before it is killed. is_stopped: it is, now.
    """

    client: ClientProcess
    stalls: bool
    delay_s: float
    start_by_s: float
    due_s: float | None = None
    is_stopped: bool = False
    has_gone_on: bool = False


@dataclass
class _Run:
    world: World
    daemon: DaemonProcess
    figures: Figures
    rng: random.Random
    stall_every: int
    quarantine_s: float
    digests: dict[str, int] = field(default_factory=dict)
    most_quarantined: int = 0


def run(
    folder: Path,
    rng: random.Random,
    num_kills: int,
    stall_every: int = STALL_EVERY,
    program: str = CHECKED_DAEMON,
    quarantine_s: float = _QUARANTINE_S,
) -> Figures:
    """Without access control, under which only those attach who are granted it.

    quarantine_s: for the first stopped writer's blocks to come into quarantine, once its session
    should be over.
    """
    figures = Figures("writers", clients=CLIENTS)
    begin_s = time.monotonic()
    with served(folder, "cpu", rng, num_kills, program=program) as it:
        one = _Run(it.world, it.daemon, figures, rng, stall_every, quarantine_s)
        _fault_all(one, num_kills)
        count_calls(figures, it.world)
        figures.calls = it.world.tally().marks(
            "steps"
        )  # Commits; their other calls are not counted
    figures.seconds = time.monotonic() - begin_s
    figures.notes.append(
        f"{len(one.digests)} contents of committed blocks, each with one digest of its K/V; "
        f"up to {one.most_quarantined} blocks in quarantine"
    )
    if figures.faults["writers stopped beyond their session"] and not one.most_quarantined:
        figures.problems.append("no block was in quarantine though writers stood still")
    return figures


def _fault_all(one: _Run, num_kills: int) -> None:
    rows = iter(range(num_kills))
    samples = [one.daemon.usage()]
    running = [_start(one, row) for row in islice(rows, CLIENTS)]
    while running:
        time.sleep(_LOOK_S)
        for victim in running:
            _advance(one, victim)
        for victim in [victim for victim in running if victim.client.wait(0.0)]:
            running.remove(victim)
            one.figures.problems += victim.client.problems()
            one.figures.faults["writers killed"] += victim.client.was_killed
            samples.append(one.daemon.usage())
            running += _next(one, rows)
    # A stopped writer's session ends by its TTL, and a killed one's by its broken stream.
    seconds = check_daemon(one.figures, one.daemon)
    _look(one)
    samples.append(one.daemon.usage())
    one.figures.notes.append(f"all was free {seconds:.2f} s after the last kill")
    judge(one.figures, "writers", samples)


def _next(one: _Run, rows: Iterator[int]) -> list[_Victim]:
    return [_start(one, row) for row in islice(rows, 1)]


def _start(one: _Run, row: int) -> _Victim:
    rng = one.rng
    comes_back = rng.random() < 0.5
    life = attached.write_without_end
    client = start_client(life, one.world, row, rng.randrange(2**32), _TTL_S, comes_back)
    stalls = row % one.stall_every == 0
    return _Victim(client, stalls, rng.uniform(*_WRITES_S), time.monotonic() + _START_S)


def _advance(one: _Run, victim: _Victim) -> None:
    now_s, process = time.monotonic(), victim.client.process
    if victim.due_s is None:
        if one.world.tally().of_row(victim.client.row).marked("steps"):
            victim.due_s = now_s + victim.delay_s
        elif now_s > victim.start_by_s:
            one.figures.problems.append("a writer did not begin")
            process.kill()
        return
    if now_s < victim.due_s or process.pid is None or process.exitcode is not None:
        return
    if victim.stalls and not victim.has_gone_on:
        _stop_or_go_on(one, victim, now_s)
        return
    process.kill()
    _look(one)


def _stop_or_go_on(one: _Run, victim: _Victim, now_s: float) -> None:
    """Others have the blocks that are free, until it goes on, and for a while after that."""
    if not victim.is_stopped:
        _signal(victim, signal.SIGSTOP)
        one.figures.faults["writers stopped beyond their session"] += 1
        victim.is_stopped, victim.due_s = True, now_s + _STALL_S
        return
    quarantined = one.daemon.stats().quarantined
    one.most_quarantined = max(one.most_quarantined, quarantined)
    assert victim.due_s is not None
    if not one.most_quarantined and now_s < victim.due_s + one.quarantine_s:
        return
    _look(one)
    _signal(victim, signal.SIGCONT)
    victim.has_gone_on, victim.due_s = True, time.monotonic() + _GOES_ON_S


def _signal(victim: _Victim, number: signal.Signals) -> None:
    assert victim.client.process.pid is not None
    os.kill(victim.client.process.pid, number)


def _look(one: _Run) -> None:
    """A hash that has been seen before has the K/V that it had."""
    for block_hash, digest in one.daemon.ask("contents"):
        if one.digests.setdefault(block_hash, digest) != digest:
            one.figures.wrong += 1
            one.figures.problems.append(f"the K/V of block hash {block_hash[:16]} have changed")
