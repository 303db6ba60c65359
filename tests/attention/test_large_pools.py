"""Addresses beyond 2**31 elements. The pools are sparse files: only touched pages cost memory."""

import mmap
import os

import numpy as np
import pytest
import torch

from prefixcache.attention.batch import make_batch
from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

HKV, B, D = 2, 16, 64
NUM_BLOCKS = 2**31 // (2 * HKV * B * D) + 8


def sparse_bytes(count: int) -> torch.Tensor:
    """`[count] uint8`, none of them touched."""
    fd = os.memfd_create("sparse-pool", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, count)
        return torch.frombuffer(mmap.mmap(fd, count), dtype=torch.uint8)
    finally:
        os.close(fd)


def sparse_pool() -> torch.Tensor:
    """`[N, 2, Hkv * B * D] bfloat16` of more than 2**31 elements."""
    pool = sparse_bytes(NUM_BLOCKS * 2 * HKV * B * D * 2).view(torch.bfloat16)
    assert pool.numel() > 2**31
    return pool.view(NUM_BLOCKS, 2, HKV * B * D)


def caches(pool: torch.Tensor, heads_first: bool) -> KVCache:
    if heads_first:
        keys, values = pool.view(NUM_BLOCKS, 2, HKV, B, D).unbind(1)
    else:
        keys, values = pool.view(NUM_BLOCKS, 2, B, HKV, D).transpose(2, 3).unbind(1)
    return KVCache(keys, values)


@pytest.mark.parametrize("heads_first", [True, False])
def test_the_highest_blocks_work_like_the_lowest(heads_first: bool) -> None:
    """Write, prefill and decode: no block id times stride is cut to 32 bits."""
    cache = caches(sparse_pool(), heads_first)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 40, HKV, D, generator=generator).bfloat16()
    q = torch.randn(40, 4 * HKV, D, generator=generator).bfloat16()
    outputs = []
    for table in ([2, 0, 1], [NUM_BLOCKS - 1, NUM_BLOCKS - 3, NUM_BLOCKS - 2]):
        tables = [np.array(table, dtype=np.int32)]
        prompt = make_batch(tables, [0], [40], [0], B)
        last = make_batch(tables, [39], [1], [0], B)
        write_kv(cache, k, v, prompt.slot_mapping)
        outputs.append(prefill(q, cache, prompt, AttentionOptions()))
        outputs.append(decode(q[-1:], cache, last, AttentionOptions()))
    assert outputs[0].abs().sum() > 0
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_the_highest_blocks_are_copied_like_the_lowest() -> None:
    """In a pool of more than 2**31 words of 32 bits."""
    block_bytes = 2**16
    num_blocks = 2**33 // block_bytes + 8
    pool = sparse_bytes(num_blocks * block_bytes).view(num_blocks, block_bytes)
    low, high, middle = pool[2], pool[num_blocks - 1], pool[num_blocks // 2]
    low.copy_(torch.arange(block_bytes).to(torch.uint8))
    copy_blocks(pool, [2], pool, [num_blocks - 1])
    assert torch.equal(high, low)
    copy_blocks(pool, [num_blocks - 1], pool, [num_blocks // 2])
    assert torch.equal(middle, low)
