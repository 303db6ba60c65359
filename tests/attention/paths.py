"""Every way by which attention is computed on a CPU here: all take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from prefixcache.attention.decode import decode, decode_in_torch
from prefixcache.attention.device import native_forms
from prefixcache.attention.native_attention import native_attention
from prefixcache.attention.prefill import prefill, prefill_in_torch

Launcher = Callable[..., torch.Tensor]
"""Arguments and result as of `decode`."""

NATIVE: dict[str, Launcher] = {
    form: partial(native_attention, form=form) for form in native_forms()
}
"""By instruction set; empty where nothing was compiled."""
IN_TORCH: dict[str, Launcher] = {
    "prefill in torch": prefill_in_torch,
    "decode in torch": decode_in_torch,
}
ALL: dict[str, Launcher] = {"prefill": prefill, "decode": decode} | IN_TORCH | NATIVE
