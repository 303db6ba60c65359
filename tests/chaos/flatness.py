"""Whether a daemon takes no more memory, threads and descriptors the longer it is under load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.chaos.daemon_process import Usage
from tests.chaos.report import Figures

_WARM_PART = 0.3
"""Of the samples, until memory may not grow any more."""
MAX_GROWTH_BYTES = 8 * 2**20
"""Of the resident memory after that: what an allocator moves by."""
_MAX_MORE_FILES = 2


def judge(figures: Figures, name: str, samples: Sequence[Usage]) -> None:
    """samples: over the load, the first before there was any client and the last without any."""
    before, after = samples[0], samples[-1]
    warm = samples[int(len(samples) * _WARM_PART) :]
    sizes = np.array([sample.rss_bytes for sample in warm], dtype=np.float64)
    third = max(1, len(sizes) // 3)
    growth = float(np.median(sizes[-third:]) - np.median(sizes[:third]))
    figures.notes.append(
        f"{name}: daemon {sizes[0] / 2**20:.0f} to {sizes[-1] / 2**20:.0f} MiB once warm"
        f" (growth {growth / 2**20:+.2f} MiB), threads {before.num_threads} to"
        f" {after.num_threads}, descriptors {before.num_files} to {after.num_files}"
    )
    if growth > MAX_GROWTH_BYTES:
        figures.problems.append(f"{name}: memory grew by {growth / 2**20:.1f} MiB")
    if after.num_files > before.num_files + _MAX_MORE_FILES:
        figures.problems.append(
            f"{name}: descriptors: {before.num_files} before the clients, {after.num_files} after"
        )
