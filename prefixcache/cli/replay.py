"""`prefixcache replay`: a trace through pools of several sizes, or through a daemon.

Owns the options, their checks and the printing. Unlike the commands that only ask a daemon, this
one changes its cache, so it takes one only by `--target`, never by the environment or by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import AsJson, connect
from prefixcache.cli.progress import progress_bar
from prefixcache.cli.trace import TraceBlock, TracePath, check_divides, open_trace
from prefixcache.replay import (
    DaemonTarget,
    InProcessTarget,
    ReplayResult,
    Target,
    Trace,
    replay_trace,
)
from prefixcache.sizes import MAX_BLOCKS

if TYPE_CHECKING:
    from prefixcache.client import Client, ServerInfo

HashAlgorithmName = Literal["sha256_cbor", "xxhash_cbor", "xxh3"]

UNBOUNDED = "inf"
"""The pool size that never evicts."""
_TIMEOUT_S = 30.0
_RULES = {"limit": "full", "dup": "first", "keyless": "front", "output": "none", "inflight": 1}
"""What the counts depend on, in the words of the block-granular simulator they are compared with:
a whole prompt may be hit, content is registered once, blocks without a hash are reused first,
generated tokens are not stored, one request at a time.
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """One replay to do. pool: the size as it was asked for."""

    pool: str
    target: Target
    hash_algorithm: str


@takes_credentials
def replay(
    trace_path: TracePath,
    credentials: MakeCredentials,
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Pool sizes in blocks, each a replay of its own; inf never evicts. "
            "With --target: the daemon's, and may be left out.",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a block; divides the trace block, and is that by default."
        ),
    ] = None,
    trace_block: TraceBlock = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            help="Replay through this daemon (unix:/path or host:port; started with "
            "--storage none), instead of in this process.",
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="With --target: first drop what the daemon has cached.")
    ] = False,
    hash_algorithm: Annotated[
        HashAlgorithmName | None,
        typer.Option(help="By default sha256_cbor, or with --target the daemon's."),
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count hits and evictions of a request trace, exactly.

    Requests run one at a time (lookup, allocate, commit, free), prompts only.
    Token ids are made up so that prompts share prefixes as the trace says.
    Requests that need more blocks than the pool has are rejected and counted
    apart.
    """
    if target is None:
        if reset:
            raise typer.BadParameter("needs --target", param_hint="--reset")
        sizes = _pool_sizes(blocks)
        trace = open_trace(trace_path, trace_block, first)
        size = trace.trace_block if block_size is None else block_size
        check_divides(size, trace.trace_block)
        _run(trace, _in_process(trace, sizes, size, hash_algorithm or "sha256_cbor"), as_json)
        return
    with connect(target, _TIMEOUT_S, credentials) as client:
        info = client.server_info()
        _check_options(info, blocks, block_size, hash_algorithm)
        trace = open_trace(trace_path, trace_block, first)
        check_divides(info.block_size, trace.trace_block)
        if reset:
            client.reset_cache()
        _run(trace, _through_daemon(client), as_json)


def _pool_sizes(blocks: str | None) -> list[str]:
    if blocks is None:
        raise typer.BadParameter("is needed without --target", param_hint="--blocks")
    sizes = [size.strip() for size in blocks.split(",")]
    for size in sizes:
        is_number = re.fullmatch(r"[0-9]{1,10}", size) and 1 <= int(size) <= MAX_BLOCKS
        if size != UNBOUNDED and not is_number:
            raise typer.BadParameter(
                f"{size!r} is no pool size: 1 to {MAX_BLOCKS}, or {UNBOUNDED}",
                param_hint="--blocks",
            )
    return sizes


def _in_process(
    trace: Trace, sizes: list[str], block_size: int, hash_algorithm: str
) -> Iterator[_Run]:
    """One pool at a time: each is made when the one before is done."""
    unbounded = trace.num_blocks_without_eviction(block_size)
    for size in sizes:
        num_blocks = unbounded if size == UNBOUNDED else int(size)
        yield _Run(size, InProcessTarget(num_blocks, block_size, hash_algorithm), hash_algorithm)


def _check_options(
    info: ServerInfo,
    blocks: str | None,
    block_size: int | None,
    hash_algorithm: str | None,
) -> None:
    """Raises BadParameter for options that the daemon contradicts, and for one that has storage."""
    if "commit" not in info.capabilities:
        raise typer.BadParameter(
            "this daemon holds K/V, which a replay has none of; start one with --storage none",
            param_hint="--target",
        )
    for option, given, actual in (
        ("--blocks", blocks, str(info.num_blocks)),
        ("--block-size", block_size, info.block_size),
        ("--hash-algorithm", hash_algorithm, info.hash_algorithm),
    ):
        if given is not None and given != actual:
            raise typer.BadParameter(f"is {given}, the daemon has {actual}", param_hint=option)


def _through_daemon(client: Client) -> Iterator[_Run]:
    info = client.server_info()
    yield _Run(str(info.num_blocks), DaemonTarget(client), info.hash_algorithm)


def _run(trace: Trace, runs: Iterator[_Run], as_json: bool) -> None:
    for index, run in enumerate(runs):
        if index == 0 and not as_json:
            typer.echo(_HEADINGS)
        with progress_bar() as bar:
            task = bar.add_task(f"{run.pool} blocks", total=trace.num_tokens)
            result = replay_trace(trace, run.target, partial(bar.advance, task))
        typer.echo(json.dumps(_json_row(run, result)) if as_json else _text_row(run, result))


def _json_row(run: _Run, result: ReplayResult) -> dict[str, Any]:
    counts = asdict(result)
    del counts["num_blocks"]
    return {
        "pool": run.pool,
        **_RULES,
        **counts,
        "keys_end": result.cached_end,
        "hit_rate_blocks": round(result.hit_rate_blocks, 6),
        "hit_rate_tokens": round(result.hit_rate_tokens, 6),
        "hash_algorithm": run.hash_algorithm,
        "seconds": round(result.seconds, 3),
    }


_HEADINGS = (
    f"{'pool':>9} {'requests':>9} {'rejected':>9} {'query blocks':>13} {'hit blocks':>11} "
    f"{'hit rate':>9} {'query tokens':>13} {'hit tokens':>12} {'evictions':>10} {'seconds':>8}  "
    "digest"
)


def _text_row(run: _Run, result: ReplayResult) -> str:
    return (
        f"{run.pool:>9} {result.requests:>9} {result.rejected:>9} {result.query_blocks:>13} "
        f"{result.hit_blocks:>11} {result.hit_rate_blocks:>9.2%} {result.query_tokens:>13} "
        f"{result.hit_tokens:>12} {result.evictions:>10} {result.seconds:>8.2f}  "
        f"{result.digest[:16]}"
    )
