"""A trace over time: the working set in windows, and how long blocks wait for their next use.

Time is the trace's own, or the number of requests where it does not say. Plain functions of one
walk (`reuse`), which has to be of all requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.errors import InvalidArgumentError
from prefixcache.replay.reuse import Reuse
from prefixcache.replay.trace import Trace

MAX_WINDOWS = 1000
GAP_QUANTILES = (0.1, 0.5, 0.9, 0.99)

_NUM_WINDOWS = 12


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace, `[start, end)` on its clock. All counts are of full blocks.

    distinct_blocks: the working set, what a pool needs to serve this window alone. new_blocks:
    those among them that nobody asked for before.
    """

    start: float
    end: float
    requests: int
    query_blocks: int
    distinct_blocks: int
    new_blocks: int


@dataclass(frozen=True, slots=True)
class Gaps:
    """How long blocks that are asked for again had to wait: `quantiles` as in `GAP_QUANTILES`.

    num_blocks: how many times a block was asked for again. gaps, shares: `[n] float64`, steps of
    the distribution: `shares[i]` of those waits were `gaps[i]` at most.
    """

    num_blocks: int
    quantiles: tuple[float, ...]
    gaps: npt.NDArray[np.float64]
    shares: npt.NDArray[np.float64]


class Clock:
    """When each request came: `times`, `[n] float64` from 0 on, never falling.

    unit: "s", or "requests" if the trace does not say the time of each.
    """

    def __init__(self, trace: Trace) -> None:
        stamps = [request.timestamp_ms for request in trace.requests]
        if None in stamps:
            self.unit = "requests"
            self.times = np.arange(len(stamps), dtype=np.float64)
            return
        self.unit = "s"
        times_s = np.array(stamps, dtype=np.float64) / 1000
        self.times = np.maximum.accumulate(times_s - times_s[:1])


def windows(clock: Clock, reuse: Reuse, width: float | None = None) -> tuple[Window, ...]:
    """All windows of a trace in order, empty ones included. width: in the clock's unit, by
    default a twelfth of the whole.

    Raises InvalidArgumentError if that makes more than `MAX_WINDOWS`.
    """
    if not len(clock.times):
        return ()
    duration = float(clock.times[-1])
    if width is None:
        width = (duration + (clock.unit == "requests")) / _NUM_WINDOWS or 1.0
    # Windows are half open, but for the last one: the last request may be just at its end.
    count = max(1, int(np.ceil(duration / width)))
    if count > MAX_WINDOWS:
        raise InvalidArgumentError(
            "window",
            f"{width:g} {clock.unit} makes {count} windows of {duration:g} {clock.unit}, "
            f"must make {MAX_WINDOWS} at most",
        )
    window_of = np.minimum(clock.times // width, count - 1).astype(np.int64)
    return _counted(window_of, width, count, reuse)


def _counted(
    window_of: npt.NDArray[np.int64], width: float, count: int, reuse: Reuse
) -> tuple[Window, ...]:
    requests = np.bincount(window_of, minlength=count)
    queries = np.zeros(count, dtype=np.int64)
    new, again = queries.copy(), queries.copy()
    np.add.at(queries, window_of, reuse.num_queried)
    np.add.at(new, window_of, reuse.num_new)
    is_within = window_of[reuse.request] == window_of[reuse.previous]
    np.add.at(again, window_of[reuse.request][is_within], reuse.num_blocks[is_within])
    columns = (requests, queries, queries - again, new)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(Window(i * width, (i + 1) * width, *row) for i, row in enumerate(rows))


def reuse_gaps(clock: Clock, reuse: Reuse) -> Gaps:
    """Of each block that was asked for before, the time since then; quantiles are 0 if none was."""
    gaps, where = np.unique(
        clock.times[reuse.request] - clock.times[reuse.previous], return_inverse=True
    )
    weights = np.bincount(where, weights=reuse.num_blocks, minlength=len(gaps))
    total = int(weights.sum())
    shares = np.cumsum(weights) / max(total, 1)
    at = np.searchsorted(shares, GAP_QUANTILES).clip(max=max(len(gaps) - 1, 0))
    quantiles = tuple(gaps[at].tolist()) if total else (0.0,) * len(GAP_QUANTILES)
    return Gaps(total, quantiles, gaps, shares)
