"""Part 3: calls of every RPC that are cancelled or whose deadline passes, after 0.1 to 20 ms, and
streams that are cut in the middle."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.chaos import lives
from tests.chaos.clients import World, start_client
from tests.chaos.load import check_daemon, collect, served
from tests.chaos.report import Figures
from tests.chaos.tally import RPCS

CLIENTS = 6
_OWNER_TTL_S = 2.0
"""A client without a session may leave a sequence that was made after it has closed."""
_ONLY_WITH = {"Commit": "none", "Prefill": "cpu", "Decode": "cpu"}


def run(folder: Path, rng: random.Random, seconds: float) -> Figures:
    """Half of the time with K/V in the daemon, half without; every third client has no session."""
    figures = Figures("cuts", clients=CLIENTS)
    for storage in ("none", "cpu"):
        with served(
            folder,
            storage,
            rng,
            CLIENTS,
            *("--owner-ttl", str(_OWNER_TTL_S)),
            has_tenants=storage == "none",
        ) as it:
            world = it.world
            rpcs = [rpc for rpc in RPCS if _ONLY_WITH.get(rpc, storage) == storage]
            begin_s = time.monotonic()
            clients = [
                start_client(
                    lives.cut,
                    world,
                    row,
                    rng.randrange(2**32),
                    seconds / 2,
                    rpcs,
                    60.0 if row % 3 else None,
                )
                for row in range(CLIENTS)
            ]
            collect(figures, world, clients, seconds / 2 + lives.CUT_PATIENCE_S)
            figures.seconds += time.monotonic() - begin_s
            check_daemon(figures, it.daemon)
            _count_cuts(figures, world)
    missing = [rpc for rpc in RPCS if not figures.faults[rpc]]
    if missing:
        figures.problems.append(f"no call was cut of: {', '.join(missing)}")
    return figures


def _count_cuts(figures: Figures, world: World) -> None:
    for rpc, count in world.tally().by_rpc("cut").items():
        if _ONLY_WITH.get(rpc, world.storage) == world.storage:
            figures.faults[rpc] += count
