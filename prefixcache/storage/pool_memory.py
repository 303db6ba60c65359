"""The one allocation that holds the K/V of every block.

Owns the bytes; `pool_views` makes views of them. Does not know which blocks are in use:
that is the core's pool. Made once at start and never grown.

On CPU the memory is an anonymous shared-memory file (memfd), so that other processes on the host
can map it, and it is prefaulted, so that no call pays for page faults and a lack of memory shows
at start. On CUDA it is one device allocation.
"""

from __future__ import annotations

import os

import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import MAX_BLOCKS
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.host_memory import available_host_bytes
from prefixcache.storage.layout import Layout
from prefixcache.storage.pool_views import PoolViews, check_fixed_scales
from prefixcache.storage.shared_memory import create_shared_memory, map_shared_memory


class PoolMemory(PoolViews):
    """The memory of `num_blocks` blocks, and the views of it.

    Raises InvalidArgumentError before any memory is spent if the count is out of range, the scales
    do not fit the layout, or the device has less memory available. The content is zeros.
    """

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        device: str = "cpu",
        fixed_scales: FixedScales | None = None,
    ) -> None:
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise InvalidArgumentError("num_blocks", f"must be in 1..{MAX_BLOCKS}, is {num_blocks}")
        check_fixed_scales(layout, fixed_scales)
        self.num_blocks = num_blocks
        # Python integers: the product exceeds 32 bits in every real pool.
        size = num_blocks * layout.block_bytes
        _check_available(size, torch.device(device))
        self._fd: int | None = None
        if torch.device(device).type == "cpu":
            self._fd, memory = _make_shared(size)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        super().__init__(layout, memory, fixed_scales)

    @property
    def fd(self) -> int | None:
        """The memfd behind the pool on CPU; None on CUDA and once closed.

        It belongs to the pool: duplicate it to keep it.
        """
        return self._fd

    def close(self) -> None:
        """`release`; the pool's own descriptor goes too. A second call does nothing."""
        self.release()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


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


def _make_shared(size: int) -> tuple[int, torch.Tensor]:
    """A new memfd of `size` bytes and a tensor over it, all of its pages present."""
    try:
        fd = create_shared_memory("prefixcache-kv", size)
        try:
            mapped = map_shared_memory(fd, size, writable=True)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise InvalidArgumentError("num_blocks", f"cannot map {size} bytes: {error}") from error
    return fd, torch.frombuffer(mapped, dtype=torch.uint8)
