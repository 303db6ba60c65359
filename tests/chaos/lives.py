"""What client processes do from beginning to end, one function for each kind of client.

Each returns its problems, in words.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import count

from prefixcache.errors import UnavailableError
from tests.chaos.clients import World, connected
from tests.chaos.link import Kill
from tests.chaos.walk import walk_until

_AT_ONCE = ("GetServerInfo", "OpenSession", "KeepAlive")
"""Calls that a client makes before all others."""
_PATIENCE_S = 60.0
"""The pool may be full of what others hold."""
CUT_PATIENCE_S = 30.0
"""Beyond the time given, for the first call of each RPC to be cut."""
_TURN_S = 0.6


def load(world: World, row: int, seed: int, seconds: float) -> list[str]:
    """Random calls for so long, and a clean end: the session is closed, or just forgotten."""
    with connected(world, row, seed) as it:
        walk_until(it.walk, time.monotonic() + seconds)
        if it.rng.random() < 0.5:
            it.client.close()
        return it.walk.problems


def load_without_end(world: World, row: int, seed: int, ttl_s: float = 60.0) -> list[str]:
    """Until it is killed from outside."""
    with connected(world, row, seed, session_ttl_s=ttl_s) as it:
        while not it.walk.problems:
            it.walk.step()
        return it.walk.problems


def killed(world: World, row: int, seed: int, kill: Kill, ttl_s: float) -> list[str]:
    """Some random calls, and then the one at which the process dies."""
    with connected(world, row, seed, session_ttl_s=ttl_s) as it:
        if kill.rpc in _AT_ONCE:
            it.link.kill = kill
        for _ in range(it.rng.randrange(12)):
            it.walk.step()
        it.link.kill = kill
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            if kill.rpc in (*_AT_ONCE, "CloseSession", "Free"):
                # A new sequence opens the session, and with it the stream of beats.
                it.walk.make("Allocate")
            if kill.rpc == "CloseSession":
                it.client.close()
                break
            it.walk.make("Lookup" if kill.rpc in _AT_ONCE else kill.rpc)
        return [*it.walk.problems, f"it has lived on after {kill}"]


def through_restarts(world: World, row: int, seed: int, until_s: float) -> list[str]:
    """Random calls while the daemon comes and goes. until_s: of the monotonic clock."""
    with connected(world, row, seed, faults=(UnavailableError,)) as it:
        walk_until(it.walk, until_s)
        it.walk.free_all()
        it.client.close()
        return it.walk.problems


def cut(
    world: World, row: int, seed: int, seconds: float, rpcs: Collection[str], ttl_s: float | None
) -> list[str]:
    """Clients one after the other, most of whose calls are cut short; of the last one not the end,
    which must succeed. They go on until a call of each of `rpcs` was cut, whoever made it."""
    until_s = time.monotonic() + seconds
    tally = world.tally()

    def is_over() -> bool:
        left_s = until_s - time.monotonic()
        by_rpc = tally.by_rpc("cut")
        return left_s <= 0 and (left_s <= -CUT_PATIENCE_S or all(by_rpc[rpc] for rpc in rpcs))

    problems: list[str] = []
    for turn in count(seed):
        with connected(
            world, row, turn, faults=(UnavailableError,), cut_rate=0.6, session_ttl_s=ttl_s
        ) as it:
            walk_until(it.walk, time.monotonic() + _TURN_S)
            is_last = is_over()
            if is_last or ttl_s is None:
                it.link.cut_rate = 0.0
                it.walk.free_all()
            it.client.close()
            problems += it.walk.problems
        if is_last:
            return problems
    raise AssertionError
