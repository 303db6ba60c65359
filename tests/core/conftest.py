"""Plain asserts outside test files show their values too."""

import pytest

pytest.register_assert_rewrite(
    "tests.core.machine", "tests.support.invariants", "tests.support.model"
)
