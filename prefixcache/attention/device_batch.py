"""An `AttentionBatch` on the device, in the form in which the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.batch import AttentionBatch

_ALIGNMENT = 4  # int32 of the 16 bytes at which the compiler wants pointers to start


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What the kernels read of an `AttentionBatch`: int32, contiguous, on the device."""

    block_tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor


def upload(batch: AttentionBatch, device: torch.device) -> DeviceBatch:
    """The batch's arrays on `device`, by one copy."""
    arrays = (batch.block_tables, batch.query_start, batch.seq_lens)
    return DeviceBatch(*upload_arrays(arrays, device))


def upload_arrays(
    arrays: Sequence[npt.NDArray[np.int32]], device: torch.device
) -> list[torch.Tensor]:
    """Small arrays on `device`, contiguous, by one copy."""
    starts = np.cumsum([0] + [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    packed = np.zeros(starts[-1], dtype=np.int32)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.size] = array.ravel()
    memory = torch.from_numpy(packed).to(device)
    return [
        memory[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]
