"""How findings of `prefixcache analyze` are printed: tables for people, objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prefixcache.cli.output import print_rows, to_json
from prefixcache.sizes import format_size

if TYPE_CHECKING:
    from prefixcache.replay.analysis import Analysis
    from prefixcache.replay.curve import PoolCounts

GAP_NAMES = ("p10", "p50", "p90", "p99")
_WORTH = "from there on, twice the pool adds less than 1 point of hit rate"
_CLOSE_RATE = 0.01
"""Hit rates that differ by less do not speak for a block size."""


@dataclass(frozen=True, slots=True)
class Report:
    """One trace in blocks of one size. block_bytes: None without a K/V layout. present: the pool
    sizes that were asked about, each to be compared with twice as much.
    """

    trace: str
    analysis: Analysis
    block_bytes: int | None
    present: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{Path(self.trace).name}, blocks of {self.analysis.block_size}"

    def memory_bytes(self, num_blocks: int) -> int | None:
        return None if self.block_bytes is None else num_blocks * self.block_bytes

    def memory(self, num_blocks: int) -> str:
        """Bytes of a pool, to four digits."""
        num_bytes = self.memory_bytes(num_blocks)
        return "-" if num_bytes is None else _short_size(num_bytes)


def print_report(report: Report) -> None:
    analysis = report.analysis
    most = analysis.curve.most_hit_blocks
    best = max(analysis.largest_request, analysis.curve.best_size)
    typer.echo(f"{report.trace}, blocks of {analysis.block_size} tokens")
    print_rows(
        [
            ("requests", f"{analysis.requests:,}"),
            ("prompt tokens", f"{analysis.prompt_tokens:,}"),
            ("full blocks", f"{analysis.query_blocks:,}, {analysis.distinct_blocks:,} distinct"),
            ("largest request", _size(report, analysis.largest_request)),
            ("most hits", f"{_share(most, analysis.query_blocks)} with {_size(report, best)}"),
            ("doubling stops", f"at {_size(report, analysis.doubling_stops_at)}: {_WORTH}"),
        ]
    )
    typer.echo()
    _print_pools(report)
    for size in report.present:
        _print_doubled(report, size)
    typer.echo()
    _print_good_sizes(report)
    typer.echo()
    _print_windows(report)
    gaps = analysis.gaps
    waits = ", ".join(
        f"{name} {value:,.4g} {analysis.time_unit}"
        for name, value in zip(GAP_NAMES, gaps.quantiles, strict=True)
    )
    typer.echo(f"\nblocks asked for again: {gaps.num_blocks:,}, after {waits}\n")


def print_comparison(reports: Sequence[Report]) -> None:
    """Block sizes beside each other, with pools of as many tokens; nothing for a single one."""
    if len(reports) < 2:
        return
    tokens = max(_tokens(report, report.analysis.curve.best_size) for report in reports)
    fewest = max(_tokens(report, report.analysis.largest_request) for report in reports)
    sizes = [max(tokens, fewest)]
    while sizes[-1] // 2 >= fewest and len(sizes) < 9:
        sizes.append(sizes[-1] // 2)
    typer.echo(f"{reports[0].trace}, hit tokens of all prompt tokens by block size")
    typer.echo(f"{'pool tokens':>14}" + "".join(f"{_block_size(r):>9}" for r in reports))
    for size in reversed(sizes):
        rates = "".join(f"{_token_rate(report, size):>9.2%}" for report in reports)
        typer.echo(f"{size:>14,}{rates}")
    typer.echo(
        f"largest block size within {_CLOSE_RATE:.0%} of the most hits at each of these sizes: "
        f"{_best_block_size(reports, sizes)}\n"
    )


def to_object(report: Report) -> object:
    analysis = report.analysis
    most = analysis.curve.most_hit_blocks
    return to_json(
        {
            "trace": report.trace,
            "block_size": analysis.block_size,
            "block_bytes": report.block_bytes,
            "requests": analysis.requests,
            "prompt_tokens": analysis.prompt_tokens,
            "query_blocks": analysis.query_blocks,
            "distinct_blocks": analysis.distinct_blocks,
            "most_hit_blocks": most,
            "largest_request_blocks": analysis.largest_request,
            "best_blocks": max(analysis.largest_request, analysis.curve.best_size),
            "doubling_stops_at_blocks": analysis.doubling_stops_at,
            "pools": [_pool_object(report, pool) for pool in analysis.pools],
            "good_sizes": [
                {**asdict(good), "memory_bytes": report.memory_bytes(good.num_blocks)}
                for good in analysis.good_sizes
            ],
            "time_unit": analysis.time_unit,
            "windows": [asdict(window) for window in analysis.windows],
            "reused_blocks": analysis.gaps.num_blocks,
            "reuse_gaps": dict(zip(GAP_NAMES, analysis.gaps.quantiles, strict=True)),
        }
    )


def _pool_object(report: Report, pool: PoolCounts) -> dict[str, object]:
    return {
        **asdict(pool),
        "hit_rate_blocks": round(pool.hit_rate_blocks, 6),
        "hit_rate_tokens": round(pool.hit_rate_tokens, 6),
        "memory_bytes": report.memory_bytes(pool.num_blocks),
    }


def _print_pools(report: Report) -> None:
    most = report.analysis.curve.most_hit_blocks
    typer.echo(
        f"{'pool':>12} {'memory':>9} {'hit rate':>9} {'of most':>8} {'hit tokens':>14} "
        f"{'of tokens':>9} {'evictions':>11} {'rejected':>9}"
    )
    for pool in report.analysis.pools:
        typer.echo(
            f"{pool.num_blocks:>12,} {report.memory(pool.num_blocks):>9} "
            f"{pool.hit_rate_blocks:>9.2%} {_share(pool.hit_blocks, most):>8} "
            f"{pool.hit_tokens:>14,} {pool.hit_rate_tokens:>9.2%} {pool.evictions:>11,} "
            f"{pool.rejected:>9,}"
        )


def _print_doubled(report: Report, size: int) -> None:
    counts = {pool.num_blocks: pool for pool in report.analysis.pools}
    now, doubled = counts[size], counts[2 * size]
    more = doubled.hit_tokens - now.hit_tokens
    typer.echo(
        f"twice {_size(report, size)}: hit rate {now.hit_rate_blocks:.2%} -> "
        f"{doubled.hit_rate_blocks:.2%}, {more:,} prompt tokens more from the cache"
    )


def _print_good_sizes(report: Report) -> None:
    analysis = report.analysis
    typer.echo("smallest pools that reject nothing, by their part of the most hits")
    typer.echo(f"{'of most':>12} {'pool':>12} {'memory':>9} {'hit rate':>9}")
    for good in analysis.good_sizes:
        hits = int(analysis.curve.hit_blocks(good.num_blocks))
        typer.echo(
            f"{good.share:>12.0%} {good.num_blocks:>12,} {report.memory(good.num_blocks):>9} "
            f"{_share(hits, analysis.query_blocks):>9}"
        )


def _print_windows(report: Report) -> None:
    analysis = report.analysis
    typer.echo(f"working set in windows, start in {analysis.time_unit}")
    typer.echo(
        f"{'start':>12} {'requests':>9} {'blocks':>11} {'distinct':>11} {'new':>11} {'memory':>9}"
    )
    for window in analysis.windows:
        typer.echo(
            f"{window.start:>12,.6g} {window.requests:>9,} {window.query_blocks:>11,} "
            f"{window.distinct_blocks:>11,} {window.new_blocks:>11,} "
            f"{report.memory(window.distinct_blocks):>9}"
        )


def _size(report: Report, num_blocks: int) -> str:
    memory = f" ({report.memory(num_blocks)})" if report.block_bytes is not None else ""
    return f"{num_blocks:,} blocks{memory}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0.0:.2%}"


def _short_size(num_bytes: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.4g} {unit}"
    return format_size(num_bytes)


def _tokens(report: Report, num_blocks: int) -> int:
    return num_blocks * report.analysis.block_size


def _block_size(report: Report) -> str:
    return str(report.analysis.block_size)


def _token_rate(report: Report, pool_tokens: int) -> float:
    analysis = report.analysis
    hits = int(analysis.curve.hit_blocks(pool_tokens // analysis.block_size))
    return hits * analysis.block_size / max(1, analysis.prompt_tokens)


def _best_block_size(reports: Sequence[Report], sizes: Sequence[int]) -> int:
    """The fewer blocks for as many tokens, the less work and the smaller the tables."""
    best = [max(_token_rate(report, size) for report in reports) for size in sizes]
    close = [
        report.analysis.block_size
        for report in reports
        if all(
            _token_rate(report, size) > rate - _CLOSE_RATE
            for size, rate in zip(sizes, best, strict=True)
        )
    ]
    return max(close, default=min(report.analysis.block_size for report in reports))
