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

import math
import mmap
import os

import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import MAX_BLOCKS
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.host_memory import available_host_bytes
from prefixcache.storage.kv_cache import KVCache, KVScales
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Element types by the names that layouts have for them."""


class PoolMemory:
    """K/V of `num_blocks` blocks, each one span as its layout says.

    fixed_scales: of a layout with one scale a tensor, needed by it and by no other.

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
        _check_fixed_scales(layout, fixed_scales)
        self.layout = layout
        self._fixed_scales = fixed_scales
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        # Python integers: the product exceeds 32 bits in every real pool.
        size = num_blocks * layout.block_bytes
        _check_available(size, self.device)
        self._fd: int | None = None
        if self.device.type == "cpu":
            self._fd, memory = _map_shared(size)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._view(memory)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of q, k, v and out; that of the views too unless they are quantised."""
        return DTYPES[self.layout.dtype]

    @property
    def fd(self) -> int | None:
        """The memfd behind the pool on CPU; None on CUDA and once closed.

        It belongs to the pool: duplicate it to keep it.
        """
        return self._fd

    def layer(self, layer: int) -> KVCache:
        """K and V of one layer, and their scales: strided views of every block."""
        if not 0 <= layer < len(self._layers):
            raise InvalidArgumentError(
                "layer", f"must be in 0..{len(self._layers) - 1}, is {layer}"
            )
        return self._layers[layer]

    @property
    def spans(self) -> torch.Tensor:
        """All blocks as bytes, everything of every layer: `[N, block_bytes] uint8`, contiguous."""
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
        layout = self.layout
        self._spans = memory.view(-1, layout.block_bytes)
        elements = self._spans[:, : math.prod(layout.block_shape) * layout.element_bytes]
        blocks = elements.view(DTYPES[layout.stored_dtype]).unflatten(1, layout.block_shape)
        if isinstance(layout, LatentLayout):
            # [N, L, B, R + P]; the one head is a dimension of length 1.
            latents = (layer[:, None] for layer in blocks.unbind(1))
            self._layers = [
                KVCache(keys, keys[..., : layout.value_dim], is_latent=True) for keys in latents
            ]
            return
        scales = self._scales_of_layers(layout)
        pairs = (layer.unbind(1) for layer in blocks.unbind(1))
        self._layers = [
            KVCache(keys, values, scale)
            for (keys, values), scale in zip(pairs, scales, strict=True)
        ]

    def _scales_of_layers(self, layout: KVLayout) -> list[KVScales] | list[None]:
        if layout.scales_shape is None:
            return [None] * layout.num_layers
        region = self._spans[:, layout.kv_bytes :].view(torch.float32)
        numbers = region[:, : math.prod(layout.scales_shape)].unflatten(1, layout.scales_shape)
        pairs = [layer.unbind(1) for layer in numbers.unbind(1)]
        fixed = self._fixed_scales
        if fixed is None:
            return [KVScales(keys, values) for keys, values in pairs]
        shape = (len(numbers), layout.num_kv_heads, layout.block_size)
        # Not `expand`, which leaves a dimension of length 1 its stride.
        stride = (numbers.stride(0), 0, 0)
        return [
            KVScales(keys.as_strided(shape, stride), values.as_strided(shape, stride), pair)
            for (keys, values), pair in zip(
                pairs, zip(fixed.keys, fixed.values, strict=True), strict=True
            )
        ]


def _check_fixed_scales(layout: Layout, fixed_scales: FixedScales | None) -> None:
    quantization = layout.quantization
    wants_them = quantization is not None and quantization.scales == "tensor"
    if wants_them != (fixed_scales is not None):
        needs = "needed" if wants_them else "unfit"
        raise InvalidArgumentError("fixed_scales", f"{needs} for the layout {layout}")
    if fixed_scales is not None and len(fixed_scales.keys) != layout.num_layers:
        raise InvalidArgumentError(
            "fixed_scales",
            f"for {len(fixed_scales.keys)} layers, the layout has {layout.num_layers}",
        )


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
