"""Views of the K/V of a pool's blocks, over any memory that has them.

Owns no memory: `pool_memory` makes it, and a client maps what a daemon has made. Does not know
which blocks are in use: that is the core's pool.

Threads: the views may be used by any thread. Nothing here locks; who uses them sees to it that no
two threads touch one block while one of them writes.
"""

from __future__ import annotations

import math

import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.fixed_scales import FixedScales
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


class PoolViews:
    """K/V of blocks, each one span as its layout says.

    memory: `[N * block_bytes] uint8`, contiguous. fixed_scales: of a layout with one scale a
    tensor, needed by it and by no other. Raises InvalidArgumentError if the scales do not fit the
    layout.
    """

    def __init__(
        self, layout: Layout, memory: torch.Tensor, fixed_scales: FixedScales | None = None
    ) -> None:
        check_fixed_scales(layout, fixed_scales)
        self.layout = layout
        self.device = memory.device
        self.fixed_scales = fixed_scales
        self._view(memory)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of q, k, v and out; that of the views too unless they are quantised."""
        return DTYPES[self.layout.dtype]

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

    def release(self) -> None:
        """Let go of the memory; there are no blocks then.

        Views that are still alive stay valid and keep the memory until they are gone.
        """
        self._view(torch.empty(0, dtype=torch.uint8, device=self.device))

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
        fixed = self.fixed_scales
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


def check_fixed_scales(layout: Layout, fixed_scales: FixedScales | None) -> None:
    """Raises InvalidArgumentError."""
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
