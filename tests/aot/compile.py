"""Compile a Triton kernel for a card that is not here, and read what came out.

A cubin's machine code is read with the `cuobjdump` in triton's wheel, AMD code from its assembly.
Needs no device; must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_CUDA_CODE = {
    "spills": r"\b(?:STL|LDL)\b",
    "tcgen05": r"\bUTC\w*MMA\b",
    "wgmma": r"\bHGMMA\b",
    "mma": r"\bHMMA\b",
    "async_loads": r"\bLDGSTS\S*\.128\b",
    "loads": r"\bLDG(?!STS)\S*\.128\b",
    "narrow_stores": r"\bSTG(?!\S*\.128\b)",
    "byte_stores": r"\bSTG\S*\.[US](?:8|16)\b",
    "narrow_loads": r"\bLDG(?:STS)?\S*\.[US](?:8|16)\b",
}
_AMD_CODE = {
    "mma": r"\bv_mfma_",
    "loads": r"\b(?:global|buffer)_load_dwordx4\b",
    "narrow_stores": r"\b(?:global|buffer)_store_(?!dwordx4\b)",
    "byte_stores": r"\b(?:global|buffer)_store_(?:byte|short)",
    "narrow_loads": r"\b(?:global|buffer)_load_(?:[us]byte|[us]short|short)",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel became on one target."""

    registers: int
    """A thread; of AMD's two kinds together."""
    shared_bytes: int
    code: Mapping[str, int]
    """How often each kind of instruction occurs: the keys of `_CUDA_CODE`. `spills` are loads and
    stores of spilled registers, on AMD the registers spilled."""


def compile_kernel(
    kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, int], target: str
) -> Compiled:
    """Compile `kernel` with `arguments`: a type for each, or the value of a constant.

    A type is text as in `triton.tools.compile`: `*bf16:16` is a pointer to 16 bytes, `i32:16` a
    multiple of 16. Tuples are tuples of these.
    """
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = _describe(arguments[name], (index,), constants, attributes)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=dict(options))
    shared_bytes = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        return _read_amd(compiled.asm["amdgcn"], shared_bytes)
    return _read_cuda(compiled.asm["cubin"], shared_bytes)


def _describe(
    argument: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    if isinstance(argument, tuple):
        return tuple(
            _describe(part, (*path, index), constants, attributes)
            for index, part in enumerate(argument)
        )
    if not isinstance(argument, str):
        constants[path] = argument
        return "constexpr"
    kind, _, divisor = argument.partition(":")
    if divisor:
        attributes[path] = [["tt.divisibility", int(divisor)]]
    return kind


def _read_cuda(cubin: bytes, shared_bytes: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [_CUOBJDUMP, option, file.name], check=True, capture_output=True, text=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    (registers,) = re.findall(r"\bREG:(\d+)", usage)
    return Compiled(int(registers), shared_bytes, _count(_CUDA_CODE, code))


def _read_amd(assembly: str, shared_bytes: int) -> Compiled:
    numbers = {
        name: int(value) for name, value in re.findall(r"\.(\w+_(?:count|size)):\s*(\d+)", assembly)
    }
    code = _count(_AMD_CODE, assembly) | {"spills": numbers["vgpr_spill_count"]}
    return Compiled(numbers["vgpr_count"], shared_bytes, code)


def _count(patterns: Mapping[str, str], code: str) -> dict[str, int]:
    return {name: len(re.findall(patterns.get(name, r"\A\Z"), code)) for name in _CUDA_CODE}
