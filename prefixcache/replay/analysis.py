"""What a trace says about the size of a pool: the hit rate by size, and the load over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from prefixcache.replay.curve import HitCurve, PoolCounts
from prefixcache.replay.reuse import Track, blocks_needed, find_reuse
from prefixcache.replay.trace import Trace
from prefixcache.replay.working_set import Clock, Gaps, Window, reuse_gaps, windows

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
LEAST_GAIN_OF_DOUBLING = 0.01

_NUM_SIZES = 9


@dataclass(frozen=True, slots=True)
class GoodSize:
    """The smallest pool, in blocks, with a `share` (0 to 1) of the hits that are possible, and
    which admits every request.
    """

    share: float
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """One trace in blocks of one size. All counts are exact, as `HitCurve` says.

    largest_request: blocks that the longest prompt needs; a smaller pool refuses it. curve: of
    pools that refuse none. pools: counts of chosen sizes, ascending. doubling_stops_at: blocks
    from which on a pool of twice the size hits less than 1 % of the blocks more. time_unit: of
    windows and gaps, "s" or "requests".
    """

    block_size: int
    requests: int
    prompt_tokens: int
    query_blocks: int
    distinct_blocks: int
    largest_request: int
    curve: HitCurve
    pools: tuple[PoolCounts, ...]
    good_sizes: tuple[GoodSize, ...]
    doubling_stops_at: int
    time_unit: str
    windows: tuple[Window, ...]
    gaps: Gaps


def analyze_trace(
    trace: Trace,
    block_size: int,
    sizes: Sequence[int] = (),
    window: float | None = None,
    track: Track | None = None,
) -> Analysis:
    """Walk a trace once, and once more for each chosen size that refuses requests.

    sizes: of pools, in blocks, each at least 1; by default the smallest with all possible hits
    and its halves. window: see `working_set.windows`. Raises InvalidArgumentError.
    """
    needed = blocks_needed(trace, block_size)
    largest = max(1, int(needed.max(initial=1)))
    reuse = find_reuse(trace, block_size, track=track)
    curve, clock = HitCurve(trace, reuse), Clock(trace)
    if not sizes:
        sizes = _halves(max(largest, curve.best_size))
    return Analysis(
        block_size=block_size,
        requests=len(trace.requests),
        prompt_tokens=trace.num_tokens,
        query_blocks=int(reuse.num_queried.sum()),
        distinct_blocks=curve.num_distinct,
        largest_request=largest,
        curve=curve,
        pools=_count_pools(trace, curve, largest, sizes, track),
        good_sizes=tuple(
            GoodSize(share, max(largest, curve.smallest_pool(share))) for share in SHARES
        ),
        doubling_stops_at=max(largest, curve.doubling_stops_at(LEAST_GAIN_OF_DOUBLING)),
        time_unit=clock.unit,
        windows=windows(clock, reuse, window),
        gaps=reuse_gaps(clock, reuse),
    )


def _halves(size: int) -> list[int]:
    return [-(-size // 2**power) for power in range(_NUM_SIZES)]


def _count_pools(
    trace: Trace, curve: HitCurve, largest: int, sizes: Sequence[int], track: Track | None
) -> tuple[PoolCounts, ...]:
    """Pools that admit the same requests share a curve."""
    needed = blocks_needed(trace, curve.block_size)

    def num_admitted(size: int) -> int:
        return int((needed <= size).sum())

    counts: list[PoolCounts] = []
    for _, group in groupby(sorted(set(sizes)), num_admitted):
        alike = list(group)
        if alike[0] < largest:
            reuse = find_reuse(trace, curve.block_size, alike[0], track)
            counts += map(HitCurve(trace, reuse).at, alike)
        else:
            counts += map(curve.at, alike)
    return tuple(counts)
