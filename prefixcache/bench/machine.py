"""What a measurement was made on: processor, memory, versions, and which core ran."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefixcache import __version__
from prefixcache.core.form import FORM

_PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "triton")
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """cores: those that this process may use. load: runnable processes, mean of a minute.

    versions: of packages that are installed. gpus: names, empty without an NVIDIA driver.
    core: the form of it that ran, `native` or `python`.
    """

    cpu: str
    cores: int
    memory_bytes: int
    load: float
    os: str
    python: str
    prefixcache: str
    versions: dict[str, str]
    gpus: tuple[str, ...]
    core: str


def machine_facts() -> MachineFacts:
    """Look at this machine. Imports no torch and touches no GPU."""
    return MachineFacts(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load=round(os.getloadavg()[0], 2),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        prefixcache=__version__,
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        gpus=_gpu_names(),
        core=FORM,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _gpu_names() -> tuple[str, ...]:
    files = sorted(_GPUS.glob("*/information"))
    names = (re.search(r"^Model:\s*(.+)$", file.read_text("utf-8"), re.MULTILINE) for file in files)
    return tuple(name[1] for name in names if name)
