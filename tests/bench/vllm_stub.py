"""Modules with the names and signatures that the peer uses of vLLM 0.33, and a dict for a cache.

They keep the contract that matters to it: a request hashes its prompt when it is made, a lookup
finds leading full blocks but never all tokens, allocation registers at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Hash = Callable[[Any], bytes]


def get_hash_fn_by_name(name: str) -> Hash:
    if name not in ("sha256", "sha256_cbor", "xxhash_cbor"):
        raise ValueError(name)
    return lambda value: hashlib.sha256(repr(value).encode()).digest()


def init_none_hash(hash_fn: Hash) -> None:
    assert hash_fn("seed")


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Hash
) -> Callable[[Request], list[bytes]]:
    def hasher(request: Request) -> list[bytes]:
        new = []
        for start in range(
            len(request.block_hashes) * hash_block_size,
            request.num_tokens - hash_block_size + 1,
            hash_block_size,
        ):
            parent = (new or request.block_hashes or [b""])[-1]
            tokens = request.all_token_ids[start : start + hash_block_size]
            new.append(caching_hash_fn((parent, tokens)))
        return new

    return hasher


@dataclass
class SamplingParams:
    max_tokens: int


class Request:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        pooling_params: None,
        block_hasher: Callable[[Request], list[bytes]],
    ) -> None:
        assert isinstance(prompt_token_ids, list)
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self._block_hasher = block_hasher
        self.block_hashes += block_hasher(self)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append_output_token_ids(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.block_hashes += self._block_hasher(self)


@dataclass
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: FullAttentionSpec


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[KVCacheGroupSpec]


class BlockPool:
    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        self.blocks = list(range(num_gpu_blocks))


@dataclass
class KVCacheManager:
    config: KVCacheConfig
    max_model_len: int
    scheduler_block_size: int
    hash_block_size: int
    cached: set[bytes] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)

    def get_computed_blocks(self, request: Request) -> tuple[list[bytes], int, int]:
        usable = (request.num_tokens - 1) // self.hash_block_size
        found: list[bytes] = []
        for block_hash in request.block_hashes[:usable]:
            if block_hash not in self.cached:
                break
            found.append(block_hash)
        return found, len(found) * self.hash_block_size, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: list[bytes] | None = None,
    ) -> list[int] | None:
        end = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        assert end == request.num_tokens
        needed = -(-end // self.hash_block_size)
        others = sum(self.held.values()) - self.held.get(request.request_id, 0)
        if others + needed > self.config.num_blocks - 1:
            return None
        self.held[request.request_id] = needed
        self.cached.update(request.block_hashes)
        return list(range(needed))

    def free(self, request: Request) -> None:
        del self.held[request.request_id]


MODULES = {
    "vllm.sampling_params": (SamplingParams,),
    "vllm.utils.hashing": (get_hash_fn_by_name,),
    "vllm.v1.core.block_pool": (BlockPool,),
    "vllm.v1.core.kv_cache_manager": (KVCacheManager,),
    "vllm.v1.core.kv_cache_utils": (get_request_block_hasher, init_none_hash),
    "vllm.v1.kv_cache_interface": (FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec),
    "vllm.v1.request": (Request,),
}


def stub_modules() -> dict[str, ModuleType]:
    """All modules by name, their packages included."""
    modules: dict[str, ModuleType] = {}
    for name, contents in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            modules.setdefault(package, ModuleType(package))
        for each in contents:
            setattr(modules[name], each.__name__, each)
    return modules
