"""vLLM's own block manager, measured in the same rounds, where vLLM is importable.

Never a dependency: it is imported when it is asked for. Written for vLLM 0.33, by its public calls:
a `Request` hashes its prompt when it is made, `get_computed_blocks` looks it up, `allocate_slots`
takes its blocks and registers them at once, which here is Allocate and Commit. Prompts are lists,
as vLLM wants them, made before the clock starts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from prefixcache.bench.core import PEER, CoreSettings
from prefixcache.bench.core_calls import (
    ALLOCATE_COMMIT,
    APPEND_COMMIT,
    BATCH,
    BATCH_PROMPT,
    BATCH_STEPS,
    HASH_LOOKUP,
    MAKE_POOL,
    Key,
)
from prefixcache.bench.measure import Candidate, Laps
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.replay import MakeReplayer
from prefixcache.errors import PrefixCacheError
from prefixcache.types import TokenIds

ALGORITHMS = ("sha256_cbor", "xxhash_cbor", "sha256")
"""Recipes by vLLM's names; the last is its default, which pickles."""
_MAX_TOKENS = 2**22
_TOKEN = 7


class PeerMissingError(PrefixCacheError):
    """vLLM is not importable here."""

    reason = "PEER_MISSING"


@dataclass(frozen=True, slots=True)
class Vllm:
    """What is used of vLLM."""

    block_pool: Any
    manager: Any
    config: Any
    group: Any
    spec: Any
    request: Any
    sampling_params: Any
    block_hasher: Any
    hash_function: Any
    dtype: Any


def load_vllm() -> Vllm:
    """Raises PeerMissingError where vLLM, or what is used of it, cannot be imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        utils = import_module("vllm.v1.core.kv_cache_utils")
        interface = import_module("vllm.v1.kv_cache_interface")
        hash_function = import_module("vllm.utils.hashing").get_hash_fn_by_name
        utils.init_none_hash(hash_function("sha256_cbor"))
        return Vllm(
            block_pool=import_module("vllm.v1.core.block_pool").BlockPool,
            manager=import_module("vllm.v1.core.kv_cache_manager").KVCacheManager,
            config=interface.KVCacheConfig,
            group=interface.KVCacheGroupSpec,
            spec=interface.FullAttentionSpec,
            request=import_module("vllm.v1.request").Request,
            sampling_params=import_module("vllm.sampling_params").SamplingParams,
            block_hasher=utils.get_request_block_hasher,
            hash_function=hash_function,
            dtype=import_module("torch").float32,
        )
    except (ImportError, AttributeError) as error:
        raise PeerMissingError(
            f"vllm is not importable here, so it is left out: {error}"
        ) from error


class VllmManager:
    """A KVCacheManager of one layer, with a pool of so many usable blocks."""

    def __init__(self, vllm: Vllm, num_blocks: int, block_size: int, algorithm: str) -> None:
        self._vllm = vllm
        spec = vllm.spec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=vllm.dtype)
        config = vllm.config(
            num_blocks=num_blocks + 1,  # one is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[vllm.group(["layer"], spec)],
        )
        self._manager = vllm.manager(
            config, _MAX_TOKENS, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self._hasher = vllm.block_hasher(block_size, vllm.hash_function(algorithm))
        self._serial = itertools.count()
        self._params = vllm.sampling_params(max_tokens=_MAX_TOKENS)

    def request(self, token_ids: list[int]) -> Any:
        """Hash a prompt."""
        name = f"request {next(self._serial)}"
        return self._vllm.request(name, token_ids, self._params, None, block_hasher=self._hasher)

    def look_up(self, request: Any) -> int:
        """Tokens that are cached."""
        return int(self._manager.get_computed_blocks(request)[1])

    def allocate(self, request: Any) -> int | None:
        """Look up, take blocks for all tokens and register them.

        Returns how many tokens were cached, None if there is no room.
        """
        found, num_cached, *_ = self._manager.get_computed_blocks(request)
        num_tokens = request.num_tokens
        slots = self._manager.allocate_slots(request, num_tokens - num_cached, num_cached, found)
        if slots is None:
            return None
        request.num_computed_tokens = num_tokens
        return int(num_cached)

    def append(self, requests: list[Any]) -> None:
        """One token to each."""
        for request in requests:
            request.append_output_token_ids(_TOKEN)
            self._manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1

    def free(self, request: Any) -> None:
        self._manager.free(request)


class VllmUnderTest:
    """The round of `CacheUnderTest`, on a `VllmManager`."""

    def __init__(
        self,
        manager: VllmManager,
        key: Callable[..., Key],
        lengths: tuple[int, ...],
        laps: Laps[Key],
    ) -> None:
        self._manager, self._key, self._laps = manager, key, laps
        self._prompts = {tokens: Prompts(tokens, seed=tokens) for tokens in lengths}
        self._cached = {tokens: found.next().tolist() for tokens, found in self._prompts.items()}
        self._batch_prompts = Prompts(BATCH_PROMPT)
        for token_ids in self._cached.values():
            request = manager.request(token_ids)
            manager.allocate(request)
            manager.free(request)

    def round(self) -> None:
        for tokens in self._prompts:
            self._cached_prompt(tokens)
            self._new_prompt(tokens)
        self._decode()

    def _cached_prompt(self, tokens: int) -> None:
        manager, laps, token_ids = self._manager, self._laps, self._cached[tokens]
        hash_key, lookup_key = self._key("hash", tokens), self._key("lookup", tokens)
        request = laps.time(hash_key, lambda: manager.request(token_ids))
        assert laps.time(lookup_key, lambda: manager.look_up(request)) > 0
        laps.add_sum(self._key(HASH_LOOKUP, tokens), hash_key, lookup_key)
        laps.time(self._key("allocate, cached", tokens), lambda: manager.allocate(request))
        laps.time(self._key("free", tokens), lambda: manager.free(request))

    def _new_prompt(self, tokens: int) -> None:
        manager, laps = self._manager, self._laps
        request = manager.request(self._prompts[tokens].next().tolist())
        laps.time(self._key(ALLOCATE_COMMIT, tokens), lambda: manager.allocate(request))
        laps.time(self._key("free", tokens), lambda: manager.free(request))

    def _decode(self) -> None:
        manager, laps = self._manager, self._laps
        prompts = [self._batch_prompts.next()[row % 16 :].tolist() for row in range(BATCH)]
        requests = [manager.request(prompt) for prompt in prompts]
        for request in requests:
            manager.allocate(request)
        for _ in range(BATCH_STEPS):
            for batch in (requests, requests[:1]):
                key = self._key(APPEND_COMMIT, rows=len(batch))
                laps.time(key, partial(manager.append, batch))
        for request in requests:
            manager.free(request)


def core_candidates(vllm: Vllm, settings: CoreSettings, laps: Laps[Key]) -> list[Candidate]:
    """Each recipe in the smallest pool, and the larger ones with the first recipe."""
    candidates: list[Candidate] = []
    for blocks in settings.blocks:
        candidates.append(partial(_make_pool, vllm, blocks, settings.block_size, laps))
        for algorithm in ALGORITHMS if blocks == min(settings.blocks) else ALGORITHMS[:1]:
            manager = VllmManager(vllm, blocks, settings.block_size, algorithm)
            key = partial(_key, algorithm, blocks)
            candidates.append(VllmUnderTest(manager, key, settings.tokens, laps).round)
    return candidates


def _make_pool(vllm: Vllm, blocks: int, block_size: int, laps: Laps[Key]) -> None:
    key = Key(MAKE_POOL, PEER, blocks)
    laps.time(key, lambda: vllm.block_pool(blocks, True, block_size))


def _key(
    algorithm: str, blocks: int, call: str, tokens: int | None = None, rows: int | None = None
) -> Key:
    return Key(call, f"{PEER} {algorithm}", None if call == "hash" else blocks, tokens, rows)


class VllmReplayer:
    """Serves requests by a `VllmManager`."""

    def __init__(self, vllm: Vllm, algorithm: str, num_blocks: int, block_size: int) -> None:
        self._manager = VllmManager(vllm, num_blocks, block_size, algorithm)
        self._block_size = block_size

    def prepare(self, token_ids: TokenIds) -> list[int]:
        return list(token_ids.tolist())

    def serve(self, prompt: list[int]) -> int:
        """Its scheduler looks up once, and so does this."""
        request = self._manager.request(prompt)
        num_cached = self._manager.allocate(request)
        if num_cached is not None:
            self._manager.free(request)
        return (num_cached or 0) // self._block_size


def replayers(vllm: Vllm) -> dict[str, MakeReplayer]:
    """By name; one recipe, since a replay takes seconds."""
    return {f"{PEER} {ALGORITHMS[0]}": partial(VllmReplayer, vllm, ALGORITHMS[0])}
