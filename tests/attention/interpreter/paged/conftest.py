"""The kernels in this folder reduce: `tl.max` and `tl.sum`, functions of Triton's own library.

Those use `tl.core`. The interpreter puts its versions in place only in the modules that a kernel
names, which is `tl`, and the repaired interpreter does not look again for nested functions. So
here they are in place in `tl.core` for all tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="module")
def _reductions(_interpreter: None) -> Iterator[None]:
    scope = interpreter._LangPatchScope()
    interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
    yield
    scope.restore()
