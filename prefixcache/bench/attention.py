"""`bench attention`: attention beside what the machine can read, copy and multiply.

On a GPU the Triton kernels, timed by events on the device; on a CPU the CPU path, timed by the
clock, with one thread and with all. Everything else is the same. A rate is bytes, or floating
point operations, that the work needs at least, over the time that it took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, product

import torch

from prefixcache.attention.device import default_device
from prefixcache.bench.attached_cases import ATTACHED, PRIVATE, attached_case
from prefixcache.bench.attention_cases import (
    CEILINGS,
    COPY,
    MATMUL,
    READ,
    Case,
    Heads,
    Latents,
    Operation,
    ceiling_case,
    decode_case,
    latent_case,
    move_case,
    prefill_case,
    quantized_case,
    shared_case,
)
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import (
    KeyT,
    Laps,
    Progress,
    ResultT,
    Rounds,
    Summary,
    run_rounds,
    summarize,
)
from prefixcache.bench.report import Ratio, Report, Row, Target

_ROUNDS = Rounds(fewest=4, most=20, budget_s=90.0)
_FILLED_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Sizes in tokens: decodes (sequences, context), prefill (new, cached), shared (sequences,
    shared, private). ceiling_dtype: of the product that prefill is compared with. attached_pairs:
    daemons that decodes through a view take turns with.
    """

    device: str
    dtypes: tuple[str, ...]
    ceiling_dtype: str
    decodes: tuple[tuple[int, int], ...]
    latent_decode: tuple[int, int]
    prefill: tuple[int, int]
    shared: tuple[int, int, int]
    moved: int
    copy_bytes: int
    matmul_size: int
    threads: tuple[int, ...]
    heads: Heads = field(default_factory=Heads)
    latents: Latents = field(default_factory=Latents)
    attached_pairs: int = 3
    rounds: Rounds = _ROUNDS


def cpu_settings() -> AttentionSettings:
    return AttentionSettings(
        device="cpu",
        dtypes=("float32", "bfloat16"),
        ceiling_dtype="float32",
        decodes=((8, 4096),),
        latent_decode=(1, 4096),
        prefill=(2048, 2048),
        shared=(32, 4096, 64),
        moved=4096,
        copy_bytes=2**28,
        matmul_size=1536,
        threads=tuple(dict.fromkeys((1, len(os.sched_getaffinity(0))))),
    )


def gpu_settings() -> AttentionSettings:
    return AttentionSettings(
        device="cuda",
        dtypes=("bfloat16",),
        ceiling_dtype="bfloat16",
        decodes=((64, 8192), (1, 32_768)),
        latent_decode=(64, 8192),
        prefill=(8192, 8192),
        shared=(64, 8192, 256),
        moved=32_768,
        copy_bytes=2**32,
        matmul_size=8192,
        threads=(1,),
    )


def default_settings() -> AttentionSettings:
    """Of the device that a daemon would take."""
    return gpu_settings() if default_device() == "cuda" else cpu_settings()


def quick(settings: AttentionSettings) -> AttentionSettings:
    """Small sizes on the same device."""
    return AttentionSettings(
        device=settings.device,
        dtypes=settings.dtypes,
        ceiling_dtype=settings.ceiling_dtype,
        decodes=((2, 100),),
        latent_decode=(2, 100),
        prefill=(40, 24),
        shared=(3, 64, 5),
        moved=32,
        copy_bytes=2**20,
        matmul_size=64,
        threads=settings.threads,
        heads=Heads(num_kv_heads=2, group=2, head_dim=32),
        latents=Latents(num_heads=16, latent_dim=32, rope_dim=16),
        attached_pairs=1,
        rounds=Rounds.exactly(2),
    )


@dataclass(frozen=True, slots=True)
class Key:
    case: str
    operation: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Run:
    """An operation with a number of threads."""

    key: Key
    operation: Operation


class CudaLaps(Laps[KeyT]):
    """Seconds between two events on the device, around what a call has enqueued.

    Before them the device fills memory larger than its caches: so each call finds these cold, and
    the host is ahead of the device by the time that takes, which its own work then does not add.
    """

    def __init__(self) -> None:
        super().__init__()
        self._filled = torch.empty(_FILLED_BYTES, dtype=torch.uint8, device="cuda")

    def time_each(self, key: KeyT, count: int, call: Callable[[], ResultT]) -> ResultT:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self._filled.zero_()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        self.add(key, start.elapsed_time(end) / 1e3 / count)
        return result


def make_laps(device: str) -> Laps[KeyT]:
    """Timed by the device's own clock if it has one."""
    return CudaLaps() if device == "cuda" else Laps()


def bench_attention(settings: AttentionSettings, progress: Progress) -> Report:
    start = time.perf_counter()
    progress("making tensors", 0.0)
    laps: Laps[Key] = make_laps(settings.device)
    with ExitStack() as opened:
        runs = _runs(settings, make_cases(settings, opened))
        run_rounds(
            [partial(_time, laps, run.operation, run.key) for run in runs],
            settings.rounds,
            warmed_up=laps.clear,
            on_round=partial(progress, "attention"),
        )
    return Report(
        bench="attention",
        machine=machine_facts(),
        settings=asdict(settings),
        rows=tuple(_rows(settings, runs, laps)),
        seconds=time.perf_counter() - start,
    )


def make_cases(settings: AttentionSettings, opened: ExitStack) -> list[Case]:
    """opened: ends the daemons that some need."""
    heads, device = settings.heads, settings.device
    cases = [
        ceiling_case(settings.ceiling_dtype, settings.copy_bytes, settings.matmul_size, device)
    ]
    for sizes in settings.decodes:
        cases += [decode_case(heads, dtype, *sizes, device) for dtype in settings.dtypes]
        cases.append(quantized_case(heads, settings.dtypes[-1], *sizes, device))
    sizes = settings.decodes[0]
    num_pairs = settings.attached_pairs
    cases += [
        attached_case(heads, dtype, *sizes, device, num_pairs, opened) for dtype in settings.dtypes
    ]
    sizes, dtype = settings.latent_decode, settings.dtypes[-1]
    cases.append(latent_case(settings.latents, dtype, *sizes, device))
    for dtype in settings.dtypes:
        cases.append(prefill_case(heads, dtype, *settings.prefill, device))
    for dtype in settings.dtypes:
        cases.append(shared_case(heads, dtype, *settings.shared, device))
    for dtype in settings.dtypes:
        cases.append(move_case(heads, dtype, settings.moved, device))
    return cases


def _runs(settings: AttentionSettings, cases: Iterable[Case]) -> list[Run]:
    runs = []
    for case in cases:
        threads = settings.threads[-1:] if case.needs_all_threads else settings.threads
        for operation, count in product(case.operations, threads):
            runs.append(Run(Key(case.name, operation.name, case.dtype, count), operation))
    return runs


def _time(laps: Laps[Key], operation: Operation, key: Key) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(key.threads)
    try:
        laps.time(key, operation.call)
    finally:
        torch.set_num_threads(before)


def _rows(settings: AttentionSettings, runs: Sequence[Run], laps: Laps[Key]) -> Iterator[Row]:
    """Times of each case, then its rates."""
    for _, of_case in groupby(runs, key=lambda run: run.key.case):
        same = list(of_case)
        for run in same:
            yield _time_row(settings, run, laps)
        for run in same:
            yield from _rate_rows(settings, run, laps)


def _labels(settings: AttentionSettings, key: Key) -> dict[str, str | int]:
    return {"dtype": key.dtype} | ({"threads": key.threads} if settings.device == "cpu" else {})


def _time_row(settings: AttentionSettings, run: Run, laps: Laps[Key]) -> Row:
    summary, beside = laps.summary(run.key), run.operation.beside
    ratios: tuple[Ratio, ...] = ()
    if beside:
        other = laps.summary(replace(run.key, operation=beside))
        ratios = (Ratio(beside, summary.median / other.median),)
    return Row(
        section=run.key.case,
        name=run.operation.name,
        summary=summary,
        labels=_labels(settings, run.key),
        ratios=ratios,
        target=_time_target(settings, run.operation),
    )


def _time_target(settings: AttentionSettings, operation: Operation) -> Target | None:
    if operation.name == ATTACHED:
        return Target(1 / 0.95, of=PRIVATE)
    if settings.device == "cpu":
        return Target(2.0, of=READ) if operation.name == "decode" else None
    return Target(1 / 8, of="flat") if operation.name == "tree" else None


def _rate_rows(settings: AttentionSettings, run: Run, laps: Laps[Key]) -> Iterator[Row]:
    """Against the ceilings with as many threads."""
    for amount, ceiling, unit in (
        (run.operation.num_bytes, COPY, "tb_per_s"),
        (run.operation.flops, MATMUL, "tflop_per_s"),
    ):
        if not amount:
            continue
        summary = _rates(laps, run.key, amount)
        best = _ceiling(settings, laps, ceiling, run.key.threads)
        is_ceiling = run.operation.name == ceiling
        yield Row(
            section=f"{run.key.case}: rates",
            name=run.operation.name,
            summary=summary,
            unit=unit,
            labels=_labels(settings, run.key),
            ratios=() if is_ceiling else (Ratio(ceiling, summary.median / best),),
            target=_rate_target(settings, run.operation),
        )


def _ceiling(settings: AttentionSettings, laps: Laps[Key], name: str, threads: int) -> float:
    """The rate of a ceiling, in 10^12 bytes or operations a second."""
    amount = {COPY: 2 * settings.copy_bytes, MATMUL: 2 * settings.matmul_size**3}[name]
    return _rates(laps, Key(CEILINGS, name, settings.ceiling_dtype, threads), amount).median


def _rates(laps: Laps[Key], key: Key, amount: int) -> Summary:
    return summarize(amount / 1e12 / seconds for seconds in laps.samples(key))


def _rate_target(settings: AttentionSettings, operation: Operation) -> Target | None:
    if settings.device == "cpu":
        return None
    shares = {"decode": 0.85, "write_kv": 0.75, "copy_blocks": 0.9}
    if operation.name in shares:
        return Target(shares[operation.name], of=COPY, at_most=False)
    return Target(400.0, at_most=False) if operation.name == "prefill" else None
