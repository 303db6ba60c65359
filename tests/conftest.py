"""Which way Triton goes in this process: its interpreter, or with `pytest -m gpu` its compiler.

Triton decides where a function is decorated, that is when a module is imported, its own library
included. So TRITON_INTERPRET is set from here, before any other file of the tests is loaded, until
all tests are collected. While they run it is absent, and the launchers take the torch path on CPU;
`tests/attention/interpreter` sets it again.
"""

from __future__ import annotations

import os
import signal

import pytest

from prefixcache.core.form import FORM

# Plain asserts outside test files show their values too.
pytest.register_assert_rewrite("tests.core.machine", "tests.support")

VARIABLE = "TRITON_INTERPRET"

os.environ[VARIABLE] = "1"

# A shell starts its background jobs with SIGINT ignored, which the tested programs would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"core: {FORM}"


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        del os.environ[VARIABLE]


def pytest_collection_finish() -> None:
    os.environ.pop(VARIABLE, None)
