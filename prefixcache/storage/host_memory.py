"""How much memory this process may still take.

Reads the kernel's files; keeps no state. A container's limit is often far below the host's memory,
and going over it is not an error from mmap but a kill, so it has to be known before.
"""

from __future__ import annotations

import sys
from pathlib import Path


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What can be had without swapping and within the limits of our control group (v2)."""
    return min(_available_in_host(proc / "meminfo"), _available_in_cgroup(proc, cgroups))


def _available_in_host(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable")


def _available_in_cgroup(proc: Path, cgroups: Path) -> int:
    """The least that our group, and each group above it, has left."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = cgroups / own
    return min(_left_in(folder) for folder in (group, *group.parents))


def _left_in(folder: Path) -> int:
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:  # the root group has no limit, and hosts with v1 have other files
        return sys.maxsize
    if limit == "max":
        return sys.maxsize
    # Cached file pages are counted as used, and given back on demand.
    reclaimable = dict(line.split() for line in statistics.splitlines())["inactive_file"]
    return max(0, int(limit) - used + int(reclaimable))
