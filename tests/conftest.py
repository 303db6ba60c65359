"""What holds in every process of the tests: how Hypothesis makes examples, and Triton's way.

Triton runs in its interpreter, or with `pytest -m gpu` through its compiler. It decides that where
a function is decorated, that is when a module is imported, its own library included. So
TRITON_INTERPRET is set from here, before any other file of the tests is loaded, until all tests are
collected. While they run it is absent, and the launchers take the torch path on CPU;
`tests/attention/interpreter` sets it again.
"""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

from prefixcache.core.form import FORM

# Plain asserts outside test files show their values too.
pytest.register_assert_rewrite("tests.core.machine", "tests.support")

VARIABLE = "TRITON_INTERPRET"

os.environ[VARIABLE] = "1"

# The same examples in every run, however long the machine takes for one.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

# A shell starts its background jobs with SIGINT ignored, which the tested programs would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"core: {FORM}"


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        del os.environ[VARIABLE]


def pytest_collection_finish() -> None:
    os.environ.pop(VARIABLE, None)
