"""Compile every kernel for every target, check what came out, print one table.

`make kernels-aot`, or `python -m tests.aot [--record] [WORD ...]` for the cases whose names contain
one of the words. The last line is `N passed, M failed`; the exit status is 1 if M > 0. Needs no
device, and compiles everything each time. `--record` writes the registers that this version of
triton uses to recorded.json; later runs may exceed them by a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before triton decorates a kernel

import triton

from tests.aot import cases, mla_cases, tree_cases
from tests.aot.checks import problems
from tests.aot.compile import Compiled, compile_kernel

CASES = (*cases.CASES, *mla_cases.CASES, *tree_cases.CASES)
RECORDED = Path(__file__).with_name("recorded.json")
Registers = dict[str, dict[str, int]]
"""By case and target, of one version of triton."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case on a target, compiled or not."""

    index: int
    """In `CASES`."""
    target: str
    compiled: Compiled | None
    seconds: float
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.aot")
    parser.add_argument("--record", action="store_true", help="write recorded.json")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases with such a word")
    options = parser.parse_args()
    started = time.monotonic()
    outcomes = compile_all(
        [
            index
            for index, case in enumerate(CASES)
            if not options.words or any(word in case.name for word in options.words)
        ]
    )
    recorded: dict[str, Registers] = json.loads(RECORDED.read_text("utf-8"))
    registers = recorded.setdefault(triton.__version__, {})
    if options.record:
        record(registers, outcomes)
        RECORDED.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n", "utf-8")
    num_failed = report(outcomes, registers)
    print(f"triton {triton.__version__}, {time.monotonic() - started:.0f} s")
    print(f"{len(outcomes) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def compile_all(indices: Sequence[int]) -> list[Outcome]:
    """Each case for each target, on all cores, in an empty cache that is thrown away."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            futures = {
                (index, target): pool.submit(compile_one, index, target)
                for index in indices
                for target in CASES[index].targets
            }
        return [outcome_of(index, target, run) for (index, target), run in futures.items()]


def compile_one(index: int, target: str) -> tuple[Compiled, float]:
    case = CASES[index]
    launch = case.launch_on(target)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    started = time.monotonic()
    compiled = compile_kernel(case.kernel, launch.arguments, options, target)
    return compiled, time.monotonic() - started


def outcome_of(index: int, target: str, run: Future[tuple[Compiled, float]]) -> Outcome:
    error = run.exception()
    if error is not None:
        last_line = (str(error).strip() or repr(error)).splitlines()[-1]
        return Outcome(index, target, None, 0.0, f"{type(error).__name__}: {last_line}")
    compiled, seconds = run.result()
    return Outcome(index, target, compiled, seconds)


def record(registers: Registers, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.compiled is not None:
            of_case = registers.setdefault(CASES[outcome.index].name, {})
            of_case[outcome.target] = outcome.compiled.registers


def report(outcomes: Sequence[Outcome], registers: Registers) -> int:
    """Print the table, what is wrong under each row; returns how many rows have something."""
    width = max((len(case.name) for case in CASES), default=0)
    print(
        f"{'kernel':{width}}  target  warps stages  regs (rec.)  spills  shared  "
        "tensor-core code  16-byte loads   time"
    )
    num_failed = 0
    for outcome in outcomes:
        case, target = CASES[outcome.index], outcome.target
        launch = case.launch_on(target)
        start = f"{case.name:{width}}  {target:6}  {launch.num_warps:5} {launch.num_stages:6}"
        if outcome.compiled is None:
            print(start)
            wrong = [outcome.error]
        else:
            recorded = registers.get(case.name, {}).get(target)
            print(f"{start}  {describe(outcome.compiled, recorded)}  {outcome.seconds:4.1f} s")
            wrong = list(problems(case, target, launch, outcome.compiled, recorded))
        for line in wrong:
            print(f"    FAILED: {line}")
        num_failed += bool(wrong)
    for case in CASES:
        for target, ceiling in case.ceilings.items():
            print(f"{case.name} on {target}: up to {ceiling.spills} spills: {ceiling.reason}")
    return num_failed


def describe(compiled: Compiled, recorded: int | None) -> str:
    code = compiled.code
    units = {"tcgen05": "UTCMMA", "wgmma": "HGMMA", "mma": "MMA"}
    dots = " ".join(f"{code[unit]} {name}" for unit, name in units.items() if code[unit])
    loads = f"{code['async_loads']} async" if code["async_loads"] else f"{code['loads']}"
    known = f"({recorded or '-'})"
    return (
        f"{compiled.registers:4} {known:>7}  {code['spills']:6}  "
        f"{compiled.shared_bytes / 1024:4.0f} K  {dots or '-':>16}  {loads:>13}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
