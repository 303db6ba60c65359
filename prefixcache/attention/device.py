"""Where attention runs, and by which code.

Every operation has a torch path, which runs on any device, and may have a Triton kernel; attention
and `write_kv` have compiled code for CPUs as well. A launcher asks `uses_triton` and `uses_native`
once a call, and imports what it needs only then: a daemon on CPU never loads triton.

Triton reads TRITON_INTERPRET where a function is decorated, which is when its module is imported,
triton's own library included. So the variable must be set before the first import of triton; here
it is read at each call, so that afterwards a test chooses the path by setting or deleting it.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

import torch

from prefixcache.core.form import is_compiled
from prefixcache.storage.kv_cache import KVCache


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


def uses_native(cache: KVCache, *tensors: torch.Tensor) -> bool:
    """Whether compiled code takes a cache and other tensors: on CPUs, elements side by side."""
    return (
        cache.keys.device.type == "cpu"
        and bool(native_forms())
        and all(
            tensor.stride(-1) == 1 or tensor.shape[-1] == 1
            for tensor in (cache.keys, cache.values, *tensors)
        )
    )


@functools.cache
def native_forms() -> tuple[str, ...]:
    """The instruction sets that this processor has a compiled form of attention for, best first.

    Empty if the package was built without a C compiler, on other processors, and where
    PREFIXCACHE_CORE is `python` (see `prefixcache.core.form`): then the torch path runs.
    """
    if not is_compiled("prefixcache.attention.native.attention"):
        return ()
    from prefixcache.attention.native.attention import FORMS

    return FORMS


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
