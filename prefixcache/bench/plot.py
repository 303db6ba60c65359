"""Growth as a picture: cost over the size of the pool, and over live sequences.

Needs matplotlib, which is an extra: `pip install prefixcache[plot]`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from prefixcache.bench.growth import LIVE_SECTION, POOL_SECTION
from prefixcache.bench.report import Row

_PANELS = ((POOL_SECTION, "blocks", 1e9, "ns"), (LIVE_SECTION, "live_sequences", 1e6, "us"))

_HEADROOM = 2.0  # over the highest median; slow outliers would flatten the lines


def plot_growth(rows: Sequence[Row], path: Path) -> None:
    """Write medians as a PNG, and the span from the fastest to the p99, as far up as fits."""
    # The figure alone: no window, no state of matplotlib's own.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        lines[row.section, row.name].append(row)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (section, label, factor, unit) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        medians = [row.summary.median for row in rows if row.section == section]
        highest = factor * max(medians)
        for (of, name), found in lines.items():
            if of != section:
                continue
            sizes = [row.labels[label] for row in found]
            panel.plot(sizes, [row.summary.median * factor for row in found], "o-", label=name)
            lowest = [row.summary.min * factor for row in found]
            panel.fill_between(
                sizes, lowest, [row.summary.p99 * factor for row in found], alpha=0.15
            )
        panel.set(xscale="log", xlabel=label.replace("_", " "), ylabel=unit, title=section)
        panel.set_ylim(0, _HEADROOM * highest)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, format="png", dpi=120)
