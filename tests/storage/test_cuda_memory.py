"""What of a CUDA handle can be told without a GPU: each value arrives where torch wants it."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import attach_pb2
from prefixcache.storage.cuda_memory import CudaHandle, open_cuda_memory, share_cuda_memory

SHARED = (1, b"\x00handle", 2**40, 512, b"/torch_1", 3, b"event", True)
"""As `_share_cuda_` returns it: the device, then what the other side needs."""


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}")
    )


def handle() -> CudaHandle:
    storage = SimpleNamespace(_share_cuda_=lambda: SHARED)
    tensor: Any = SimpleNamespace(untyped_storage=lambda: storage)
    return share_cuda_memory(tensor)


class OpenedError(Exception):
    pass


def test_the_values_come_through_the_message_in_torchs_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = attach_pb2.CudaMemory(**asdict(handle()))
    assert message.device_uuid == "GPU-1"
    arrived = CudaHandle(**{name: getattr(message, name) for name in asdict(handle())})
    assert arrived == handle()

    def opened(*values: object) -> None:
        raise OpenedError(*values)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    with pytest.raises(OpenedError) as caught:
        open_cuda_memory(arrived)
    assert caught.value.args == SHARED


def test_a_device_that_is_not_seen_here_is_refused() -> None:
    hidden = CudaHandle("GPU-7", *SHARED[1:])
    with pytest.raises(InvalidArgumentError) as caught:
        open_cuda_memory(hidden)
    assert caught.value.field == "device"


def test_torch_has_the_functions_that_share_memory() -> None:
    """They are private: another version of torch may have others."""
    assert hasattr(torch.UntypedStorage, "_share_cuda_")
    assert hasattr(torch.UntypedStorage, "_new_shared_cuda")
