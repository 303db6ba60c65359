"""The one allocation that holds the K/V of every block.

Owns the bytes and views of them. Does not know which blocks are in use:
that is the core's pool. Made once at start and never grown.

On CPU the memory is an anonymous shared-memory file (memfd), so that other processes on the host
can map it, and it is prefaulted, so that no call pays for page faults and a lack of memory shows
at start. On CUDA it is one device allocation.

Threads: the views may be used by any thread. Nothing here locks; the engine sees to it that no
two threads touch one block while one of them writes.
"""

from __future__ import annotations

import mmap
import os

import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import MAX_BLOCKS
from prefixcache.storage.host_memory import available_host_bytes
from prefixcache.storage.kv_cache import KVCache
from prefixcache.storage.layout import KVLayout

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class PoolMemory:
    """K/V of `num_blocks` blocks, `[N, L, 2, Hkv, B, D]`.

    Raises InvalidArgumentError before any memory is spent if the count is out of range or the
    device has less memory available. The content is zeros on CPU and undefined on CUDA.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise InvalidArgumentError("num_blocks", f"must be in 1..{MAX_BLOCKS}, is {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        # Python integers: the product exceeds 32 bits in every real pool.
        size = num_blocks * layout.block_bytes
        _check_available(size, self.device)
        self._fd: int | None = None
        if self.device.type == "cpu":
            self._fd, memory = _map_shared(size)
        else:
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._view(memory)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the views."""
        return _DTYPES[self.layout.dtype]

    @property
    def fd(self) -> int | None:
        """The memfd behind the pool on CPU; None on CUDA and once closed.

        It belongs to the pool: duplicate it to keep it.
        """
        return self._fd

    def layer(self, layer: int) -> KVCache:
        """K and V of one layer, strided views of every block."""
        keys, values = self._blocks[:, self._checked_layer(layer)].unbind(1)
        return KVCache(keys, values)

    @property
    def spans(self) -> torch.Tensor:
        """All blocks as bytes, K and V of every layer: `[N, block_bytes] uint8`, contiguous."""
        return self._spans

    def block_span(self, block_id: int) -> torch.Tensor:
        """All bytes of one block: `[block_bytes] uint8`, a view."""
        if not 0 <= block_id < len(self._spans):
            raise InvalidArgumentError(
                "block_id", f"block {block_id}, and the pool has {len(self._spans)}"
            )
        return self._spans[block_id]

    def close(self) -> None:
        """Let go of the memory. The pool then has no blocks; a second call does nothing.

        Views that are still alive stay valid and keep the memory until they are gone.
        """
        self._view(torch.empty(0, dtype=torch.uint8, device=self.device))
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _view(self, memory: torch.Tensor) -> None:
        self._spans = memory.view(-1, self.layout.block_bytes)
        self._blocks = memory.view(self.dtype).view(self.layout.shape(self._spans.shape[0]))

    def _checked_layer(self, layer: int) -> int:
        if not 0 <= layer < self.layout.num_layers:
            raise InvalidArgumentError(
                "layer", f"must be in 0..{self.layout.num_layers - 1}, is {layer}"
            )
        return layer


def _check_available(size: int, device: torch.device) -> None:
    if device.type == "cpu":
        available = available_host_bytes()
    elif device.type == "cuda" and torch.cuda.is_available():
        available = torch.cuda.mem_get_info(device)[0]
    else:
        raise InvalidArgumentError("device", f"{device} cannot hold the pool here")
    if size > available:
        raise InvalidArgumentError(
            "num_blocks",
            f"needs {size:,} bytes of {device.type} memory, {available:,} are available",
            needed_bytes=size,
            available_bytes=available,
        )


def _map_shared(size: int) -> tuple[int, torch.Tensor]:
    """A new memfd of `size` bytes and a tensor over it, all of its pages present."""
    fd = os.memfd_create("prefixcache-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        os.close(fd)
        raise InvalidArgumentError("num_blocks", f"cannot map {size} bytes: {error}") from error
    # The tensor owns a reference to the mapping, which goes with the last view; closing the
    # mapping by hand would leave views that crash the process.
    return fd, torch.frombuffer(mapping, dtype=torch.uint8)
