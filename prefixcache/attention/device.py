"""Where attention runs, and by which code.

Every operation has a torch path, which runs on any device, and may have a Triton kernel. Its
launcher asks `uses_triton` once a call, and imports its kernel only then: a daemon on CPU never
loads triton.

Triton reads TRITON_INTERPRET where a function is decorated, which is when its module is imported,
triton's own library included. So the variable must be set before the first import of triton; here
it is read at each call, so that afterwards a test chooses the path by setting or deleting it.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


def default_device() -> str:
    """`"cuda"` if torch sees a device, else `"cpu"`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the launchers run Triton kernels on this tensor.

    On CUDA (and ROCm, which torch calls by the same name) wherever triton is installed; elsewhere
    if TRITON_INTERPRET is 1, which runs the kernels in Python on the CPU: for tests, and slow.
    """
    if tensor.is_cuda:
        return _has_triton()
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
