"""How durations are written for people."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """In two units at most: `3.2 s`, `5 min 7 s`, `2 h 0 min`, `41 d 6 h`. seconds: 0 or more."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.1f} s"
