"""`python -m tests.chaos`: load, faults and bad input against real daemons, and a table of it.

Exit code 1 if a call was lost, a block leaked, a reply was wrong, or anything else must not be.
The seed that is printed repeats a run, as far as time lets it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.chaos import cuts, fuzz, kills, restarts, soak
from tests.chaos.report import Figures, details, table

FULL_S = 600.0
"""The sizes below are those of a run of this length; a shorter one does less of each part."""
Run = Callable[[Path, random.Random, float], Figures]
PARTS: dict[str, Run] = {
    "kills": lambda folder, rng, scale: kills.run(
        folder, rng, max(kills.FEWEST, round(1000 * scale))
    ),
    "restarts": lambda folder, rng, scale: restarts.run(folder, rng, max(16.0, 70 * scale)),
    "cuts": lambda folder, rng, scale: cuts.run(folder, rng, max(8.0, 60 * scale)),
    "fuzz": lambda folder, rng, scale: fuzz.run(folder, rng, max(3000, round(100_000 * scale))),
    "soak": lambda folder, rng, scale: soak.run(folder, rng, max(12.0, 90 * scale)),
}


def run(part: str, seed: int, seconds: float) -> Figures:
    """One part of a run of that length in all. Each part has random numbers of its own."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        rng = random.Random(f"{seed} {part}")
        return PARTS[part](Path(folder), rng, seconds / FULL_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=FULL_S)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", choices=list(PARTS), action="append")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    found = []
    for part in arguments.only or PARTS:
        found.append(run(part, arguments.seed, arguments.seconds))
        print(details(found[-1]), flush=True)
    print(f"\n{table(found)}")
    is_clean = all(figures.is_clean for figures in found)
    print("\nnothing lost, leaked or wrong" if is_clean else "\nFAILED")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
