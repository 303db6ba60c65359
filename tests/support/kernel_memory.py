"""Which addresses a kernel reads and writes, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from triton.runtime import interpreter


@dataclass(frozen=True)
class Accesses:
    """Of all programs, in order: one address an element."""

    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


def watched(monkeypatch: pytest.MonkeyPatch) -> Accesses:
    """What kernels access from now on; masked elements do not count."""
    accesses = Accesses()
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        accesses.read.extend(pointers.data[mask.data].tolist())
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        accesses.written.extend(pointers.data[mask.data].tolist())
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
    return accesses


def addresses(tensor: torch.Tensor) -> set[int]:
    """Where the elements of a view lie."""
    index = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, stride in enumerate(tensor.stride()):
        steps = torch.arange(tensor.shape[dimension]) * stride
        index += steps.view(-1, *[1] * (tensor.ndim - dimension - 1))
    return set((index * tensor.element_size() + tensor.data_ptr()).flatten().tolist())
