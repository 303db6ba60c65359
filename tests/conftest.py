"""Which way Triton goes in this process: its interpreter, or with `pytest -m gpu` its compiler.

Triton decides where a function is decorated, that is when a module is imported, its own library
included. So TRITON_INTERPRET is set from before the first import until all tests are collected.
During the tests it is absent and the launchers take the torch path on CPU;
`tests/attention/interpreter` sets it again.
"""

from __future__ import annotations

import importlib
import os

import pytest

VARIABLE = "TRITON_INTERPRET"


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ[VARIABLE] = "1"
        importlib.import_module("triton.language")


def pytest_collection_finish() -> None:
    os.environ.pop(VARIABLE, None)
