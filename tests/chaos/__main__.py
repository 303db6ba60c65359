"""`python -m tests.chaos`: load, faults and bad input against real daemons, and a table of it.

Exit code 1 if a call was lost, a block leaked, a reply was wrong, or anything else must not be.
The seed that is printed repeats a run, as far as time lets it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import cuts, fuzz, kills, restarts, soak, writers
from tests.chaos.report import Figures, details, table

FULL_S = 600.0
NUM_KILLS, NUM_WRITER_KILLS, NUM_BAD_CALLS = 1000, 200, 100_000
"""Of a run of that length; a shorter one has fewer, and a few at least."""
_FEWEST_BAD_CALLS = 3000
_SHARES = {"restarts": 0.33, "cuts": 0.25, "soak": 0.42}
"""Of the time that the parts before leave."""
_SHORTEST_S = {"restarts": 16.0, "cuts": 8.0, "soak": 12.0}
_STARTS_S = 30.0
"""For starting daemons and clients, and for looking at what is left."""
PARTS = ("kills", "writers", "fuzz", *_SHARES)


def run(part: str, seed: int, seconds: float, spent_s: float | None = None) -> Figures:
    """One part of a run of so many seconds in all. Each part has random numbers of its own.

    spent_s: on the parts of which the size is a number; None for what they take normally.
    """
    rng, scale = random.Random(f"{seed} {part}"), seconds / FULL_S
    left_s = seconds / 2 if spent_s is None else seconds - spent_s - _STARTS_S
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        if part == "kills":
            return kills.run(folder, rng, max(kills.FEWEST, round(NUM_KILLS * scale)))
        if part == "writers":
            return writers.run(folder, rng, max(writers.FEWEST, round(NUM_WRITER_KILLS * scale)))
        if part == "fuzz":
            num_calls = max(_FEWEST_BAD_CALLS, round(NUM_BAD_CALLS * scale))
            return fuzz.run(folder, rng, num_calls)
        timed = {"restarts": restarts.run, "cuts": cuts.run, "soak": soak.run}[part]
        return timed(folder, rng, max(_SHORTEST_S[part], _SHARES[part] * left_s))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=FULL_S)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", choices=list(PARTS), action="append")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    found = []
    begin_s, spent_s = time.monotonic(), None
    for part in arguments.only or PARTS:
        found.append(run(part, arguments.seed, arguments.seconds, spent_s))
        if part == "fuzz" and not arguments.only:
            spent_s = time.monotonic() - begin_s
        print(details(found[-1]), flush=True)
    print(f"\n{table(found)}")
    is_clean = all(figures.is_clean for figures in found)
    print("\nnothing lost, leaked or wrong" if is_clean else "\nFAILED")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
