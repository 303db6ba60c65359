"""`prefixcache bench core | rpc | replay | attention`: measurements, printed as tables or JSON.

Owns the options and their checks. Exit code 0 whatever is measured; 2 for what cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prefixcache.cli import TYPER_SETTINGS
from prefixcache.cli.credentials import no_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, AsJson, connect
from prefixcache.cli.output import print_json
from prefixcache.cli.plotting import PlotFile, check_plotting
from prefixcache.cli.progress import progress_bar
from prefixcache.cli.trace import TraceBlock, TracePath, check_divides, open_trace
from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import MAX_BLOCKS

if TYPE_CHECKING:
    from prefixcache.bench.report import Report
    from prefixcache.bench.vllm_peer import Vllm

app = typer.Typer(add_completion=False, no_args_is_help=True, **TYPER_SETTINGS)

NumRounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        min=1,
        help="Rounds to run. Left out, as many as a few minutes have room for.",
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few rounds: seconds, and rough.")
]


Algorithms = Annotated[
    str | None, typer.Option(metavar="NAME[,NAME...]", help="Recipes of hashes. (all)")
]
Peer = Annotated[
    Literal["vllm"] | None,
    typer.Option(help="Also measure this block manager, in the same rounds, if it is importable."),
]


@app.callback()
def bench() -> None:
    """Measure the cache, its RPCs and attention, beside floors of the same run.

    What is compared runs in interleaved rounds; medians, fastest and slowest are shown, and ratios
    to floors or peers that ran in the same rounds. The exit code is 0 whatever is measured.
    """


@app.command()
def core(
    tokens: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Lengths of prompts. (2000,131072)")
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Sizes of pools. (20000,200000,1000000)"),
    ] = None,
    algorithms: Algorithms = None,
    peer: Peer = None,
    plot: PlotFile = None,
    rounds: NumRounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure the block manager's calls, in process.

    Hashing, lookup, allocate, commit, append and free of prompts, making a pool, bytes a block,
    and whether a call costs more in larger pools or beside more sequences.
    """
    from prefixcache.bench.core import CoreSettings, bench_core, quick_settings, with_rounds
    from prefixcache.bench.vllm_peer import core_candidates

    settings = quick_settings() if quick else CoreSettings()
    if rounds is not None:
        settings = with_rounds(settings, rounds)
    if tokens is not None:
        settings = replace(settings, tokens=_numbers(tokens, "--tokens"))
    if blocks is not None:
        settings = replace(settings, blocks=_numbers(blocks, "--blocks"))
    if algorithms is not None:
        settings = replace(settings, algorithms=_algorithms(algorithms))
    check_plotting(plot)
    vllm, notes = _load_peer(peer)
    with _progress() as show:
        report = bench_core(settings, show, partial(core_candidates, vllm) if vllm else None)
    if plot is not None:
        from prefixcache.bench.plot import plot_growth

        plot_growth(report.rows, plot)
    _print(replace(report, notes=notes), as_json)


@app.command()
def replay(
    trace_path: TracePath,
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_BLOCKS, help="Size of the pool. (never evicts)"),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a block; divides the trace block.")
    ] = 16,
    trace_block: TraceBlock = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N. (2000)")
    ] = None,
    algorithms: Algorithms = None,
    peer: Peer = None,
    rounds: NumRounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure whole replays of a request trace, in process.

    Lookup, allocate, commit and free of each request, one at a time, with each recipe. Traces are
    those of `prefixcache replay`.
    """
    from prefixcache.bench.measure import Rounds
    from prefixcache.bench.replay import ReplaySettings, bench_replay
    from prefixcache.bench.vllm_peer import replayers

    settings = ReplaySettings(block_size=block_size, blocks=blocks)
    if algorithms is not None:
        settings = replace(settings, algorithms=_algorithms(algorithms))
    if quick or rounds is not None:
        settings = replace(settings, rounds=Rounds.exactly(rounds or 1))
    trace = open_trace(trace_path, trace_block, requests or (200 if quick else 2_000))
    check_divides(block_size, trace.trace_block)
    vllm, notes = _load_peer(peer)
    with _progress() as show:
        report = bench_replay(trace, settings, show, replayers(vllm) if vllm else None)
    _print(replace(report, notes=notes), as_json)


@app.command()
def rpc(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            help="A daemon that runs already, without access control and best of --storage none; "
            "its cache is used. By default one is started.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Length of prompts.")] = 2_000,
    rounds: NumRounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure RPCs beside an echo of the same sizes.

    Lookup, Allocate, Append and Free with 1, 8 and 64 calls in flight; a short Lookup beside long
    calls of another client; and where the time of a call goes.
    """
    from prefixcache.bench.rpc import RpcSettings, bench_rpc, quick_settings, with_rounds

    settings = replace(quick_settings() if quick else RpcSettings(), target=target, tokens=tokens)
    if rounds is not None:
        settings = with_rounds(settings, rounds)
    if target is not None:
        with connect(target, DEFAULT_TIMEOUT_S, no_credentials) as client:
            client.server_info()
    with _progress() as show:
        report = bench_rpc(settings, show)
    _print(report, as_json)


@app.command()
def access(rounds: NumRounds = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Measure Lookup with access control, by token and by user, beside daemons without it."""
    from prefixcache.bench.access import AccessSettings, bench_access, quick_settings
    from prefixcache.bench.measure import Rounds

    settings = quick_settings() if quick else AccessSettings()
    if rounds is not None:
        settings = replace(settings, rounds=Rounds.exactly(rounds))
    with _progress() as show:
        report = bench_access(settings, show)
    _print(report, as_json)


@app.command()
def tensors(rounds: NumRounds = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Measure how tensors get to the daemon, by reference and in messages, beside memcpy."""
    from prefixcache.server.configured_daemon import prepare_torch

    prepare_torch(None)
    from prefixcache.bench.measure import Rounds
    from prefixcache.bench.tensors import TensorSettings, bench_tensors, quick_settings

    settings = quick_settings() if quick else TensorSettings()
    if rounds is not None:
        settings = replace(settings, rounds=Rounds.exactly(rounds))
    with _progress() as show:
        report = bench_tensors(settings, show)
    _print(report, as_json)


@app.command()
def attention(
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="On a GPU: time other tiles for each rule of the kernels' table."
        ),
    ] = False,
    rounds: NumRounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure attention beside what the machine can read, copy and multiply.

    On a GPU the kernels, else the CPU path: decode, prefill, sequences that share blocks (flat and
    as a tree), writes and copies of K/V; achieved TB/s and TFLOP/s beside the measured ceilings.
    """
    from prefixcache.server.configured_daemon import prepare_torch

    prepare_torch(None)
    if tune:
        _print(_tune(rounds), as_json)
        return
    from prefixcache.bench import attention as bench_module
    from prefixcache.bench.measure import Rounds

    settings = bench_module.default_settings()
    if quick:
        settings = bench_module.quick(settings)
    if rounds is not None:
        settings = replace(settings, rounds=Rounds.exactly(rounds))
    with _progress() as show:
        report = bench_module.bench_attention(settings, show)
    _print(report, as_json)


def _tune(rounds: int | None) -> Report:
    from prefixcache.attention.device import default_device
    from prefixcache.bench.measure import Rounds
    from prefixcache.bench.tune import TuneSettings, tune

    if default_device() != "cuda":
        raise InvalidArgumentError("--tune", "needs a GPU, and torch sees none here")
    settings = TuneSettings()
    if rounds is not None:
        settings = replace(settings, rounds=Rounds.exactly(rounds))
    with _progress() as show:
        return tune(settings, show)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint=option) from None
    if min(found) < 1:
        raise typer.BadParameter(f"{min(found)} is less than 1", param_hint=option)
    return found


def _load_peer(name: str | None) -> tuple[Vllm | None, tuple[str, ...]]:
    """What was asked for, or a note that it is not here."""
    if name is None:
        return None, ()
    from prefixcache.bench.vllm_peer import PeerMissingError, load_vllm

    try:
        return load_vllm(), ()
    except PeerMissingError as error:
        return None, (error.message,)


def _algorithms(text: str) -> tuple[str, ...]:
    from prefixcache.core.hashing import HASH_ALGORITHMS

    found = tuple(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in HASH_ALGORITHMS:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(HASH_ALGORITHMS)}", param_hint="--algorithms"
            )
    return found


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar for each step that is told of."""
    with progress_bar() as bar:
        tasks: dict[str, object] = {}

        def show(step: str, share: float) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=1.0)
            bar.update(tasks[step], completed=share)  # type: ignore[arg-type]

        yield show


def _print(report: Report, as_json: bool) -> None:
    from prefixcache.bench.report import print_report, to_json

    if as_json:
        print_json(to_json(report))
    else:
        print_report(report)
