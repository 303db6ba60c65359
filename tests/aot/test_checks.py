"""The checks of `make kernels-aot` find what they are for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aot import compile
from tests.aot.cases import Case, Ceiling, Launch
from tests.aot.checks import problems
from tests.aot.compile import Compiled

ATTENTION = Case(
    "a", None, lambda _: ROWS_64, has_dots=True, ceilings={"gfx942": Ceiling(5, "narrow tiles")}
)
MOVE = Case("m", None, lambda _: ROWS_64, moves_only=True)
QUANTIZE = Case("q", None, lambda _: ROWS_64, quantizes=True)
ROWS_16 = Launch({"BLOCK_M": 16}, num_stages=3)
ROWS_64 = Launch({"BLOCK_M": 64}, num_stages=3)
NOTHING = dict.fromkeys(compile._CUDA_CODE, 0)
GOOD = Compiled(100, 1000, NOTHING | {"wgmma": 8, "mma": 8, "async_loads": 4})


def found(
    case: Case,
    target: str,
    launch: Launch = ROWS_64,
    recorded: int | None = 100,
    registers: int = 100,
    shared_bytes: int = 1000,
    **code: int,
) -> list[str]:
    compiled = replace(
        GOOD, registers=registers, shared_bytes=shared_bytes, code={**GOOD.code, **code}
    )
    return list(problems(case, target, launch, compiled, recorded))


@pytest.mark.parametrize("target", list(compile.TARGETS))
def test_good_kernels_have_no_problems(target: str) -> None:
    assert found(ATTENTION, target) == []
    assert found(MOVE, target) == []


@pytest.mark.parametrize(
    ("case", "target", "change", "problem"),
    [
        (ATTENTION, "sm_90", {"spills": 1}, "spills"),
        (ATTENTION, "gfx942", {"spills": 6}, "6 spills, at most 5"),
        (ATTENTION, "sm_80", {"shared_bytes": 163 * 1024 + 1}, "shared memory"),
        (ATTENTION, "gfx942", {"shared_bytes": 65537}, "shared memory"),
        (ATTENTION, "sm_90", {"registers": 111}, "111 registers, 100 are recorded"),
        (ATTENTION, "sm_90", {"recorded": None}, "no recorded registers"),
        (ATTENTION, "sm_90", {"narrow_loads": 1}, "loads of one element"),
        (ATTENTION, "sm_90", {"wgmma": 0}, "no HGMMA"),
        (ATTENTION, "sm_80", {"mma": 0}, "no tensor-core instruction"),
        (ATTENTION, "sm_90", {"mma": 0, "launch": ROWS_16}, "no tensor-core instruction"),
        (ATTENTION, "sm_100", {"async_loads": 0, "loads": 4}, "no asynchronous load"),
        (MOVE, "sm_90", {"async_loads": 0}, "no load of 16 bytes"),
        (MOVE, "gfx942", {"narrow_stores": 1}, "stores of less than 16 bytes"),
        (QUANTIZE, "sm_90", {"byte_stores": 1}, "stores of less than 4 bytes"),
    ],
)
def test_a_problem_is_named(case: Case, target: str, change: dict[str, Any], problem: str) -> None:
    (line,) = found(case, target, **change)
    assert problem in line


@pytest.mark.parametrize(
    ("case", "target", "change"),
    [
        (ATTENTION, "gfx942", {"spills": 5}),
        (ATTENTION, "sm_90", {"registers": 110}),
        (ATTENTION, "sm_90", {"wgmma": 0, "launch": ROWS_16}),
        (ATTENTION, "sm_100", {"mma": 0, "tcgen05": 4}),
        (ATTENTION, "gfx942", {"async_loads": 0, "loads": 4}),
        (MOVE, "sm_90", {"mma": 0, "wgmma": 0}),
        (MOVE, "sm_90", {"byte_stores": 1}),
        (QUANTIZE, "sm_90", {"narrow_stores": 1}),
    ],
)
def test_what_is_allowed_is_no_problem(case: Case, target: str, change: dict[str, Any]) -> None:
    assert found(case, target, **change) == []


def test_instructions_are_counted_in_machine_code() -> None:
    lines = """
        LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR6][R2.64] ;
        LDGSTS.E [R5], desc[UR6][R2.64] ;
        LDG.E.128 R4, desc[UR6][R2.64] ;
        LDG.E.U16 R4, desc[UR6][R2.64] ;
        STG.E.128 desc[UR6][R2.64], R4 ;
        STG.E.64 desc[UR6][R2.64], R4 ;
        STG.E desc[UR6][R2.64], R4 ;
        STG.E.U8 desc[UR6][R2.64], R4 ;
        STL.64 [R1], R4 ;
        @!P0 LDL R4, [R1] ;
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        UTCHMMA gdesc[UR10], gdesc[UR12], tmem[UR4] ;
    """
    assert compile._count(compile._CUDA_CODE, lines) == {
        "spills": 2,
        "tcgen05": 1,
        "wgmma": 1,
        "mma": 1,
        "async_loads": 1,
        "loads": 1,
        "narrow_loads": 1,
        "narrow_stores": 3,
        "byte_stores": 1,
    }


def test_kernels_compile_without_a_device() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot", "copy_blocks"],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "4 passed, 0 failed"


def test_a_case_that_does_not_compile_fails() -> None:
    program = (
        "import sys; from tests.aot import __main__ as aot, cases;"
        "broken = lambda _: cases.Launch({}); "
        "aot.CASES = (cases.Case('broken', aot.CASES[0].kernel, broken),);"
        "sys.argv = ['aot']; sys.exit(aot.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED: KeyError" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 4 failed"
