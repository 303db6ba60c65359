"""What parts have in common: a daemon to be under load, and what is looked at in the end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.clients import ClientProcess, World
from tests.chaos.daemon_process import (
    CHECKED_DAEMON,
    DaemonProcess,
    any_options,
    daemon_process,
    wait_until_free,
)
from tests.chaos.report import Figures
from tests.chaos.tenants import access_options

FREE_S = 20.0
"""For what clients held to be free: long before their sessions end, on a busy machine too."""
_END_S = 120.0
"""Longer than any call may take: a client that has not ended by then waits for an answer."""


@dataclass(frozen=True)
class Served:
    """A daemon, and what its clients share."""

    daemon: DaemonProcess
    world: World


@contextmanager
def served(
    folder: Path,
    storage: str,
    rng: random.Random,
    num_rows: int,
    *options: str,
    has_tenants: bool = False,
    program: str = CHECKED_DAEMON,
) -> Iterator[Served]:
    """A daemon with a folder of its own in `folder`. num_rows: clients, all in all."""
    place = folder / storage
    place.mkdir(mode=0o700)
    access = access_options(place) if has_tenants else ()
    options = (*options, *access, *any_options(rng))
    with daemon_process(place, storage, *options, program=program) as daemon:
        world = World(place, storage, num_rows, has_tenants)
        world.prepare()
        yield Served(daemon, world)


def collect(
    figures: Figures, world: World, clients: Iterable[ClientProcess], seconds: float = 0.0
) -> None:
    """Wait until all clients have ended, which they are to do in so many seconds; count."""
    until_s = time.monotonic() + seconds + _END_S
    for client in clients:
        if not client.wait(max(0.0, until_s - time.monotonic())):
            client.process.kill()
            client.wait(_END_S)
            figures.problems.append(f"client {client.row} hung")
        figures.problems += client.problems()
        if not client.was_killed:
            figures.lost += world.tally().of_row(client.row).num_unanswered()
    count_calls(figures, world)


def count_calls(figures: Figures, world: World) -> None:
    tally = world.tally()
    figures.calls += tally.total("started")
    figures.lost += tally.total("late")
    figures.checked += tally.marks("checked")
    figures.wrong += tally.marks("wrong")


def check_daemon(figures: Figures, daemon: DaemonProcess, wait_s: float = FREE_S) -> float:
    """No client is left: nothing may be held, and every invariant must hold.

    Returns how long it took until nothing was held.
    """
    stats, seconds = wait_until_free(daemon, wait_s)
    if stats is None:
        figures.problems.append("the daemon does not answer")
        return seconds
    if stats.sequences or stats.referenced or stats.quarantined:
        figures.leaked += stats.referenced + stats.quarantined
        figures.problems.append(
            f"{stats.sequences} sequences, {stats.referenced} blocks and {stats.quarantined} in"
            f" quarantine are left {seconds:.2f} s after the last client"
        )
    if left := daemon.ask("left"):
        figures.problems.append(f"without any client there are {left}")
    if problem := daemon.ask("check"):
        figures.problems.append(problem)
    if count := daemon.num_internal_errors():
        figures.problems.append(f"the daemon has logged {count} errors")
    return seconds
