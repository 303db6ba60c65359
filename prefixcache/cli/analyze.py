"""`prefixcache analyze`: how large a pool should be, from request traces.

Owns the options and their checks; `prefixcache.replay.analysis` has the counts, `analyze_output`
prints them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from prefixcache.cli.analyze_output import Report, print_comparison, print_report, to_object
from prefixcache.cli.daemon import AsJson
from prefixcache.cli.output import print_json
from prefixcache.cli.plotting import PlotFile, check_plotting
from prefixcache.cli.progress import progress_bar
from prefixcache.cli.setting_options import setting_parameter, with_flag
from prefixcache.cli.trace import TraceBlock, open_trace, trace_argument
from prefixcache.config.cache import ModelSection
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS, make_section
from prefixcache.sizes import MAX_BLOCKS, parse_size

if TYPE_CHECKING:
    from prefixcache.replay import Trace, TraceRequest
    from prefixcache.storage.layout import Layout

_LAYOUT_SETTINGS = (
    "model_config",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "latent_dim",
    "rope_dim",
    "dtype",
    "kv_dtype",
)


@dataclass(frozen=True, slots=True)
class _Question:
    """What was asked. layout_of: of a block size, None if no layout was given."""

    blocks: tuple[int, ...]
    memory: tuple[int, ...]
    window: float | None
    layout_of: Callable[[int], Layout] | None


def analyze(
    trace_paths: Annotated[list[Path], trace_argument()],
    trace_block: TraceBlock = None,
    first: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")
    ] = None,
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="B[,B...]",
            help="Tokens of a block, to compare; each divides the trace block, which is the "
            "default, or is a multiple of it.",
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]", help="Pool sizes in blocks, shown beside pools of twice the size."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,SIZE...]",
            help="Pool sizes in bytes, shown beside pools of twice the size; needs the K/V layout.",
        ),
    ] = None,
    window: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Length of the windows of the working set; requests, if the trace has no "
            "timestamps. By default a twelfth of the trace.",
        ),
    ] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
    **model: str | None,
) -> None:
    """Size the pool from request traces: hits by pool size, working set, reuse.

    Each trace is walked once for all sizes; the counts are those that a replay
    would give, exactly. Requests run one at a time, prompts only. Memory is
    shown where the K/V layout is known, by --model-config or its numbers.
    """
    check_plotting(plot)
    sizes = () if block_size is None else _numbers(block_size, "--block-size", 2**20)
    if blocks is not None and memory is not None:
        raise typer.BadParameter("cannot go with --blocks", param_hint="--memory")
    if blocks is not None and len(sizes) > 1:
        raise typer.BadParameter("needs a single --block-size", param_hint="--blocks")
    question = _Question(
        () if blocks is None else _numbers(blocks, "--blocks", MAX_BLOCKS),
        () if memory is None else _memory_sizes(memory),
        _checked_window(window),
        _layout_option({key: value for key, value in model.items() if value is not None}),
    )
    if question.memory and question.layout_of is None:
        raise typer.BadParameter("needs --model-config, or the layout", param_hint="--memory")
    reports: list[Report] = []
    for path in trace_paths:
        trace = open_trace(path, trace_block, first)
        found = [_analyze(path, trace, size, question) for size in sizes or (trace.trace_block,)]
        reports += found
        if as_json:
            for report in found:
                print_json(to_object(report), on_one_line=True)
        else:
            for report in found:
                print_report(report)
            print_comparison(found)
    if plot is not None:
        from prefixcache.replay.plot import plot_analyses

        plot_analyses([(report.title, report.analysis) for report in reports], plot)


def _analyze(path: Path, trace: Trace, block_size: int, question: _Question) -> Report:
    from prefixcache.replay.analysis import analyze_trace

    layout = question.layout_of and question.layout_of(block_size)
    present = question.blocks or _blocks_of(question.memory, layout)
    wanted = sorted({*present, *(2 * size for size in present)})
    try:
        with progress_bar() as bar:
            track = None if bar.disable else partial(_track, bar)
            analysis = analyze_trace(trace, block_size, wanted, question.window, track)
    except InvalidArgumentError as error:
        flag = "--" + error.field.replace("_", "-")
        problem = error.message.removeprefix(f"{error.field}: ")
        raise typer.BadParameter(problem, param_hint=flag) from error
    return Report(str(path), analysis, layout.block_bytes if layout else None, present)


def _track(bar: Progress, requests: Sequence[TraceRequest], name: str) -> Iterator[TraceRequest]:
    task = bar.add_task(name, total=len(requests))
    yield from bar.track(requests, task_id=task)
    bar.remove_task(task)


def _blocks_of(memory: tuple[int, ...], layout: Layout | None) -> tuple[int, ...]:
    if layout is None:
        return ()
    from prefixcache.storage.layout import num_blocks_for_memory

    return tuple(num_blocks_for_memory(layout, size) for size in memory)


def _layout_option(values: dict[str, str]) -> Callable[[int], Layout] | None:
    """What makes the layout of a block size, if any of its settings is given."""
    if not values:
        return None
    section = make_section(ModelSection, values)
    if section.missing_flags:
        raise typer.BadParameter(
            "is needed too, or a --model-config", param_hint=section.missing_flags[0]
        )
    from prefixcache.server.model_layout import layout_of

    def layout(block_size: int) -> Layout:
        try:
            return layout_of(section, block_size)
        except InvalidArgumentError as error:
            raise with_flag(error) from error

    return layout


def _numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= most for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of 1 to {most}", param_hint=option)
    return tuple(dict.fromkeys(map(int, parts)))


def _memory_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from error


def _checked_window(window: float | None) -> float | None:
    if window is not None and not 0 < window < float("inf"):
        raise typer.BadParameter(f"{window:g} is not above 0", param_hint="--window")
    return window


def _with_layout_settings(command: Callable[..., None]) -> inspect.Signature:
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    layout = [
        setting_parameter(OPTIONS[key], panel="K/V layout", has_env=False)
        for key in _LAYOUT_SETTINGS
    ]
    return inspect.Signature([*own, *layout])


# typer reads the options off the signature.
analyze.__signature__ = _with_layout_settings(analyze)  # type: ignore[attr-defined]
