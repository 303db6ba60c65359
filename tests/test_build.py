"""What an installation builds: the native core where there is a C compiler, the package without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("prefixcache", "third_party", "pyproject.toml", "README.md", "LICENSE")
MODULES = (
    *("admission", "append", "commit", "free_queue", "hash_chain", "pool", "sequence_record"),
    *("slots", "plain_codec", "attention", "batch"),
)


def built(folder: str, names: list[str]) -> set[str]:
    """Of a folder's names, those that a build makes; Cython writes C beside its sources."""
    return {
        name
        for name in names
        if name == "__pycache__"
        or name.endswith(".so")
        or (name.endswith(".c") and f"{name[:-2]}.pyx" in names)
    }


def build(folder: Path, compiler: str) -> Path:
    """A wheel of a copy of the sources without anything built, made by `compiler`."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=built)
        else:
            shutil.copy(ROOT / name, folder)
    wheel = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".")
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *wheel],
        cwd=folder,
        env=os.environ | {"CC": compiler},
        check=True,
        timeout=300,
    )
    (path,) = (folder / "dist").glob("*.whl")
    return path


def form_of(wheel: Path, folder: Path, wanted: str = "") -> subprocess.CompletedProcess[str]:
    """Which form the core of an unpacked wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    program = "from prefixcache.core.sequences import FORM, Pool; print(FORM, Pool(4, 2, True))"
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "unpacked"), "PREFIXCACHE_CORE": wanted},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.slow
def test_a_wheel_has_the_native_core_and_the_licences_of_what_is_in_it(tmp_path: Path) -> None:
    wheel = build(tmp_path, os.environ.get("CC", "cc"))
    names = zipfile.ZipFile(wheel).namelist()
    compiled = [name for name in names if name.endswith(".so")]
    assert {name.split("/")[-1].split(".")[0] for name in compiled} >= set(MODULES)
    assert any(name.endswith("licenses/third_party/xxhash/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".c", ".h", ".pyx"))]
    assert form_of(wheel, tmp_path).stdout.startswith("native <prefixcache.core.native.pool.Pool")


@pytest.mark.slow
def test_without_a_compiler_the_package_installs_and_runs_in_python(tmp_path: Path) -> None:
    wheel = build(tmp_path, "/bin/false")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert form_of(wheel, tmp_path).stdout.startswith("python <prefixcache.core.python.pool.Pool")
    forced = form_of(wheel, tmp_path, "native")
    assert forced.returncode
    assert "this installation has no compiled core" in forced.stderr
