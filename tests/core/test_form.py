"""Which form of the core runs, and how an installation or an operator chooses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from prefixcache.core.form import FORM, FORM_ENV, FORMS, choose
from prefixcache.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("wanted", "is_built", "form"),
    [
        ("", True, "native"),
        ("", False, "python"),
        ("native", True, "native"),
        ("python", True, "python"),
        ("python", False, "python"),
    ],
)
def test_the_compiled_form_runs_if_it_was_built_and_python_was_not_asked_for(
    wanted: str, is_built: bool, form: str
) -> None:
    assert choose(wanted, is_built=lambda: is_built) == form


def test_the_compiled_form_that_was_not_built_cannot_be_forced() -> None:
    with pytest.raises(InvalidArgumentError, match=f"{FORM_ENV}.*no compiled core"):
        choose("native", is_built=lambda: False)


def test_another_value_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=f"{FORM_ENV}.*'rust'.*native, python"):
        choose("rust", is_built=lambda: True)


def test_what_the_tests_run_against_is_what_this_installation_can_build() -> None:
    """Building is optional, so a compiler that fails would go unnoticed."""
    compiler = os.environ.get("CC") or "cc"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    best = "native" if shutil.which(compiler) and headers.exists() else "python"
    assert (os.environ.get(FORM_ENV) or best) == FORM, "install the package again: make venv"


@pytest.mark.parametrize("wanted", ["", "python", FORM])
def test_the_environment_chooses_at_import(wanted: str) -> None:
    program = "from prefixcache.core.form import FORM; print(FORM)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {FORM_ENV: wanted},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() in ([wanted] if wanted else FORMS)
