"""What compiled kernels must show. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tests.aot.cases import Case, Ceiling, Launch
from tests.aot.compile import Compiled

# Of a program; on AMD of a workgroup.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 65536}
_WARP_GROUP_ROWS = 64
"""Rows of a matrix product from which Hopper has an instruction for four warps together."""


def problems(
    case: Case, target: str, launch: Launch, compiled: Compiled, recorded: int | None
) -> Iterator[str]:
    """What is wrong with one kernel on one target; recorded: the registers it had before."""
    code = compiled.code
    ceiling = case.ceilings.get(target, Ceiling(0, ""))
    if code["spills"] > ceiling.spills:
        yield f"{code['spills']} spills, at most {ceiling.spills} are allowed"
    if compiled.shared_bytes > SHARED_BYTES[target]:
        yield f"{compiled.shared_bytes} bytes of shared memory, there are {SHARED_BYTES[target]}"
    if recorded is None:
        yield "no recorded registers: python -m tests.aot --record"
    elif compiled.registers > recorded * 1.1:
        yield f"{compiled.registers} registers, {recorded} are recorded"

    if code["narrow_loads"]:
        yield f"{code['narrow_loads']} loads of one element"
    if case.moves_only and code["narrow_stores"]:
        yield f"{code['narrow_stores']} stores of less than 16 bytes"
    if case.quantizes and code["byte_stores"]:
        yield f"{code['byte_stores']} stores of less than 4 bytes"
    if not code["loads"] and not code["async_loads"]:
        yield "no load of 16 bytes"
    if case.has_dots:
        yield from _problems_of_dots(target, launch, compiled)


def _problems_of_dots(target: str, launch: Launch, compiled: Compiled) -> Iterator[str]:
    code = compiled.code
    rows = launch.arguments["BLOCK_M"]
    if target == "sm_90" and rows >= _WARP_GROUP_ROWS:
        if not code["wgmma"]:
            yield f"no HGMMA with {rows} rows"
    elif not code["mma"] and not code["tcgen05"]:
        yield "no tensor-core instruction"
    is_cuda = target.startswith("sm_")
    if is_cuda and launch.num_stages > 1 and not code["async_loads"]:
        yield "no asynchronous load of 16 bytes"
