"""The picture that the README draws of the package, checked against the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import prefixcache
from prefixcache import errors
from prefixcache.rpc.status import STATUS_CODES, status_code

PACKAGE = Path(prefixcache.__file__).parent
REPOSITORY = PACKAGE.parent

LAYERS = {
    "errors": 0,
    "types": 0,
    "sizes": 0,
    "durations": 0,
    "address": 0,
    "config": 0,
    "options": 0,
    "core": 1,
    "storage": 2,
    "attention": 2,
    "engine": 3,
    "rpc": 3,
    "server": 4,
    "client": 4,
    "integrations": 5,
    "attached": 5,
    "replay": 5,
    "bench": 5,
    "cli": 5,
}
"""Every part of the package. Each imports parts of its own layer or below, and never above."""

APART = {
    ("server", "client"),
    ("client", "server"),
    ("storage", "attention"),
    ("replay", "bench"),
    ("bench", "cli"),
}
"""Parts of one layer that must not know of each other, as (importer, imported)."""

FORBIDDEN = {
    "core": {"torch", "grpc", "google", "prometheus_client", "triton"},
    "rpc": {"torch"},
    "client": {"torch"},
    "errors": {"torch", "grpc", "google", "numpy"},
    "types": {"torch", "grpc", "google"},
    "address": {"torch", "grpc", "google"},
    "config": {"torch", "grpc", "google"},
    "attention": {"grpc", "google"},
    "storage": {"grpc", "google"},
    "engine": {"grpc", "google"},
}
"""Packages that a part never imports, not even inside a function."""

MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if "_pb" not in path.relative_to(PACKAGE).parts
)


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported_by(path: Path) -> set[str]:
    names = (name.split(".") for name in imports_of(path))
    return {name[1] for name in names if name[0] == "prefixcache" and name[1] in LAYERS}


@pytest.mark.parametrize("package", ["transformers"])
def test_a_package_that_is_integrated_with_is_imported_by_its_integration_only(
    package: str,
) -> None:
    importers = {
        path.relative_to(PACKAGE).parts[:2]
        for path in MODULES
        if package in {name.partition(".")[0] for name in imports_of(path)}
    }
    assert importers == {("integrations", package)}


def test_every_part_has_its_layer() -> None:
    assert {part_of(path) for path in MODULES} == LAYERS.keys() | {"__init__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":  # the package's front: what users import from it
        return
    for imported in parts_imported_by(path) - {part}:
        assert LAYERS[imported] <= LAYERS[part], f"{part} imports {imported}, which is above it"
        assert (part, imported) not in APART, f"{part} imports {imported}"


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_does_not_import_what_it_must_run_without(part: str) -> None:
    for path in MODULES:
        if part_of(path) == part:
            tops = {name.partition(".")[0] for name in imports_of(path)}
            assert not tops & FORBIDDEN[part], path


@pytest.mark.parametrize(
    "module",
    [
        "prefixcache",
        "prefixcache.core.sequences",
        "prefixcache.client",
        "prefixcache.server.daemon",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_core_runs_without_grpc() -> None:
    program = (
        "import sys, prefixcache.core.sequences; "
        "assert not {'grpc', 'torch', 'google.protobuf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- errors


def error_classes() -> dict[str, type[errors.PrefixCacheError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PrefixCacheError)
    }


def test_every_error_is_exported() -> None:
    assert sorted(errors.__all__) == sorted(error_classes())


def test_every_error_has_a_reason_of_its_own() -> None:
    reasons = [error.reason for error in error_classes().values()]
    assert len(set(reasons)) == len(reasons)
    assert all(reason == reason.upper() for reason in reasons)
    own = [error for error in error_classes().values() if "reason" not in vars(error)]
    assert not own, "a class that inherits its reason"


def test_every_error_has_one_status_code() -> None:
    for error in error_classes().values():
        if error is not errors.PrefixCacheError:
            bases = [base for base in error.__mro__ if base in STATUS_CODES]
            assert len(bases) == 1, error
            assert status_code(error.from_wire("", {})) is STATUS_CODES[bases[0]]
    codes = list(STATUS_CODES.values())
    assert len(set(codes)) == len(codes)


def test_the_tree_in_the_docstring_names_every_error() -> None:
    documented = errors.__doc__ or ""
    assert all(name in documented for name in error_classes())


# ---- generated code


def test_the_generated_code_is_what_the_protos_say() -> None:
    done = subprocess.run(
        [sys.executable, "protos/generate.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
