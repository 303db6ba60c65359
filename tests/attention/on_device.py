"""Cases of the CPU on a CUDA device."""

from __future__ import annotations

from dataclasses import replace

import torch

from prefixcache.storage.kv_cache import KVCache, KVScales
from tests.attention.paged_cases import PagedCase

DEVICE = torch.device("cuda")


def on_device(case: PagedCase) -> PagedCase:
    """q and the cache on the device; the cache stays views of one pool, poison included."""
    return replace(case, q=case.q.to(DEVICE), cache=cache_on_device(case.cache))


def cache_on_device(cache: KVCache) -> KVCache:
    pools: dict[int, torch.Tensor] = {}

    def view(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in pools:
            pools[id(base)] = base.to(DEVICE, copy=True).view(tensor.dtype)
        there = pools[id(base)]
        return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    scales = cache.scales
    if scales is not None:
        scales = KVScales(view(scales.keys), view(scales.values), scales.fixed)
    return KVCache(view(cache.keys), view(cache.values), scales, cache.is_latent)
