"""What a part does at its end: collect what the clients found, and look into the daemon."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tests.chaos.clients import ClientProcess, World
from tests.chaos.daemon_process import GRACE_S, DaemonProcess, wait_until_free
from tests.chaos.report import Figures

_END_S = 40.0
"""Longer than any call may take: a client that has not ended by then waits for an answer."""


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


def check_daemon(figures: Figures, daemon: DaemonProcess, wait_s: float = GRACE_S + 1.0) -> float:
    """No client is left: nothing may be held, and every invariant must hold.

    Returns how long it took until nothing was held.
    """
    stats, seconds = wait_until_free(daemon, wait_s)
    if stats is None:
        figures.problems.append("the daemon does not answer")
        return seconds
    if stats.sequences or stats.referenced:
        figures.leaked += stats.referenced
        figures.problems.append(
            f"{stats.sequences} sequences and {stats.referenced} blocks are left"
            f" {seconds:.2f} s after the last client"
        )
    if left := daemon.ask("left"):
        figures.problems.append(f"without any client there are {left}")
    if problem := daemon.ask("check"):
        figures.problems.append(problem)
    if count := daemon.num_internal_errors():
        figures.problems.append(f"the daemon has logged {count} errors")
    return seconds
