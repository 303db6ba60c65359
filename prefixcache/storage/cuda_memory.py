"""Device memory of one process in another: CUDA's IPC handles, as torch shares its own tensors.

Torch's way, because its caching allocator knows which allocation a tensor is a part of, and needs
no other package; the functions are those that `torch.multiprocessing` uses. CUDA knows no mapping
for reading only: whoever has a handle can write.

The memory is opened once in a process, and all processes share the one handle. Torch counts them in
a file of the owner's, from which nothing follows here: the owner keeps its memory as long as it
lives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefixcache.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """What `torch.UntypedStorage._share_cuda_` says, in its order but for the device.

    device_uuid: of the device, whose number may be another in another process.
    """

    device_uuid: str
    handle: bytes
    size_bytes: int
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


def share_cuda_memory(memory: torch.Tensor) -> CudaHandle:
    """A handle of the tensor's storage. To be made once: torch records an event for each."""
    device, *values = memory.untyped_storage()._share_cuda_()
    return CudaHandle(str(torch.cuda.get_device_properties(device).uuid), *values)


def open_cuda_memory(handle: CudaHandle) -> torch.Tensor:
    """The storage as `[n] uint8`, on its device. What its owner wrote until then is there for
    whatever the current stream runs next. Raises InvalidArgumentError if the device is not seen.
    """
    device = _device_of(handle.device_uuid)
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        handle.handle,
        handle.size_bytes,
        handle.offset_bytes,
        handle.ref_counter_handle,
        handle.ref_counter_offset,
        handle.event_handle,
        handle.event_sync_required,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device_of(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise InvalidArgumentError("device", f"the pool is on the GPU {uuid}, which is not seen here")
