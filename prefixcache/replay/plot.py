"""Analyses of traces as a picture: hit rate by pool size, working set over time, reuse gaps.

Needs matplotlib, which is an extra: `pip install prefixcache[plot]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.replay.analysis import Analysis

_NUM_POINTS = 400


def plot_analyses(analyses: Sequence[tuple[str, Analysis]], path: Path) -> None:
    """Write a PNG with a line for each (title, analysis); sizes and blocks are in tokens, so that
    block sizes can be compared.
    """
    # The figure alone: no window, no state of matplotlib's own.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    curve, load, gaps = figure.subplots(1, 3)
    for index, (title, analysis) in enumerate(analyses):
        color = f"C{index % 10}"
        _draw_curve(curve, analysis, title, color)
        _draw_load(load, analysis, color)
        if analysis.gaps.num_blocks:
            times, shares = analysis.gaps.gaps, analysis.gaps.shares
            gaps.step(times, 100 * shares, where="post", color=color)
    units = " or ".join(sorted({analysis.time_unit for _, analysis in analyses}))
    curve.set(xscale="log", xlabel="pool, tokens", ylabel="hit rate, % of full blocks")
    curve.set_title("hit rate by pool size (dotted: smaller pools reject requests)")
    load.set(xlabel=f"time, {units}", ylabel="tokens", title="working set (dashed: never seen)")
    load.set_ylim(bottom=0)
    gaps.set(xscale="symlog", xlabel=f"time since the last use, {units}", title="reuse gaps")
    gaps.set_ylabel("% of blocks asked for again")
    for panel in (curve, load, gaps):
        panel.grid(alpha=0.3)
    curve.legend(fontsize="small", loc="lower right")
    figure.savefig(path, format="png", dpi=120)


def _draw_curve(panel: Any, analysis: Analysis, title: str, color: str) -> None:
    largest, size = analysis.largest_request, analysis.block_size
    most = max(largest + 1, 2 * analysis.curve.best_size)
    pools = np.unique(np.geomspace(largest, most, _NUM_POINTS).astype(np.int64))
    rates = analysis.curve.hit_blocks(pools) / max(1, analysis.query_blocks)
    panel.plot(pools * size, 100 * rates, color=color, label=title)
    small = [pool for pool in analysis.pools if pool.num_blocks < largest]
    joined = [pool.num_blocks * size for pool in small] + [largest * size]
    # Of all blocks that the trace asks for, those of rejected requests included.
    hits = [pool.hit_blocks / max(1, analysis.query_blocks) for pool in small] + [rates[0]]
    panel.plot(joined, [100 * share for share in hits], ":", color=color)
    shown = [pool for pool in analysis.pools if pool.num_blocks >= largest]
    panel.plot(
        [pool.num_blocks * size for pool in shown],
        [100 * pool.hit_rate_blocks for pool in shown],
        "o",
        color=color,
    )


def _draw_load(panel: Any, analysis: Analysis, color: str) -> None:
    if not analysis.windows:
        return
    edges = [window.start for window in analysis.windows] + [analysis.windows[-1].end]
    for name, style in (("distinct_blocks", "-"), ("new_blocks", "--")):
        tokens = [getattr(window, name) * analysis.block_size for window in analysis.windows]
        panel.stairs(tokens, edges, linestyle=style, color=color)
