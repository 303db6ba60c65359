"""Sizes: of a pool in blocks at most, and in bytes as people write them.

`4GiB`, `512MiB`, `500MB`, `1048576`. Pure functions; imports nothing heavy, for the help needs it.
"""

from __future__ import annotations

import re

MAX_BLOCKS = 2**31 - 1
"""Blocks of the largest pool: block ids are int32."""

# 4Gi and 4GiB are 1024s, 4GB are 1000s; 4G could be either, so it is refused.
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000))
}


def parse_size(value: object) -> int:
    """Bytes. An int is taken as it is. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?\s*([A-Za-z]*)", str(value).strip(), re.ASCII)
    factor = _UNITS.get(match[3].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is no size; write bytes, or for instance 4GiB or 512MiB")
    fraction = match[2] or ""
    return int(match[1] + fraction) * factor // int(10 ** len(fraction))


def format_size(num_bytes: int) -> str:
    """The shortest form that `parse_size` reads back as the same number."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)
