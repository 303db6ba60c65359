"""Small charts as SVG, without any script: a bar of parts, and a line over time.

Lengths are of the drawing, which is stretched to the width that there is; text is left to the page
around it. Each has a label for who cannot see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 600, 100
_BAR_HEIGHT = 24


def bar(label: str, parts: Sequence[tuple[str, int]]) -> str:
    """Parts side by side, as (class, count); together they fill the width."""
    total = sum(count for _, count in parts)
    shown, rectangles = 0, []
    for name, count in parts:
        start, shown = shown, shown + count
        x, width = WIDTH * start / max(total, 1), WIDTH * count / max(total, 1)
        rectangles.append(
            f'<rect class="{name}" x="{x:.1f}" y="0" width="{width:.1f}" height="{_BAR_HEIGHT}"/>'
        )
    return _drawing(label, _BAR_HEIGHT, rectangles)


def line(
    label: str, points: Iterable[tuple[float, float | None]], span: float, highest: float
) -> str:
    """A line through (x, y), with a gap where y is None, and a dot for a point between gaps.

    span: x goes from 0 to it. highest: the y at the upper edge; 0 is at the lower one.
    """
    path: list[str] = []
    pen_is_down = False
    for x, y in points:
        if y is not None:
            place = f"{WIDTH * x / span:.1f} {HEIGHT * (1 - y / highest):.1f}"
            path.append(f"L{place}" if pen_is_down else f"M{place}h0")
        pen_is_down = y is not None
    middle = f'<path class="grid" d="M0 {HEIGHT / 2}H{WIDTH}"/>'
    return _drawing(label, HEIGHT, [middle, f'<path class="line" d="{"".join(path)}"/>'])


def _drawing(label: str, height: int, shapes: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {height}" '
        f'preserveAspectRatio="none">{"".join(shapes)}</svg>'
    )
