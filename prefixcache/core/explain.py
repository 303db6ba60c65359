"""Why a prompt is not cached beyond its hits: the first block that missed, and what became of it.

A reason is what the daemon knows, from the surest to the least sure: what the prompt itself asks
for; the live sequences; the evictions and the last reset, which the pool remembers in part; and the
cached block that is most like the missed one. Nothing is guessed: where something may have been
forgotten the answer is UNKNOWN. Looks and changes nothing; guarded by the core's lock.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import cbor2

from prefixcache.core.admission import Plan, num_usable_blocks
from prefixcache.core.extra_keys import block_extra_keys
from prefixcache.core.hashing import Hasher
from prefixcache.core.live import LiveSequences
from prefixcache.core.nearest import MAX_SEQUENCES, MissedBlock, NearestBlocks
from prefixcache.core.pool import Pool
from prefixcache.core.recent_keys import RecentKeys
from prefixcache.core.sequence import Prompt, Sequence, uint32_array
from prefixcache.types import (
    CacheUse,
    Explanation,
    FullHit,
    KeyDifference,
    KeyKind,
    MissReason,
)

_DIGEST_DIGITS = 16
"""Hexadecimal digits of a digest that is shown in place of what it is of."""


class _Finding(NamedTuple):
    """The fields of an Explanation that are not of every one."""

    reason: MissReason
    age_s: float | None = None
    first_different_token: int | None = None
    key_differences: tuple[KeyDifference, ...] = ()


class Explainer:
    """recent_keys: of prompts that came lately."""

    def __init__(
        self, pool: Pool, live: LiveSequences, hasher: Hasher, recent_keys: RecentKeys
    ) -> None:
        self._pool = pool
        self._live = live
        self._nearest = NearestBlocks(pool, live, hasher, recent_keys)

    def explain(
        self, prompt: Prompt, plan: Plan, full_hit: FullHit, cache_use: CacheUse
    ) -> Explanation:
        """plan: of this prompt, made now."""
        found = self._finding(prompt, plan, full_hit, cache_use)
        hashes = prompt.chain.hashes[len(plan.hits) :] if prompt.chain is not None else ()
        return Explanation(
            num_cached_tokens=plan.num_cached_tokens,
            num_cached_blocks=len(plan.hits),
            num_pending_tokens=plan.num_pending_tokens,
            reason=found.reason,
            block_hash=hashes[0] if hashes else b"",
            age_s=found.age_s,
            first_different_token=found.first_different_token,
            key_differences=found.key_differences,
            keeps_content=self._pool.keeps_content,
        )

    def _finding(
        self, prompt: Prompt, plan: Plan, full_hit: FullHit, cache_use: CacheUse
    ) -> _Finding:
        if prompt.chain is None:
            return _Finding(MissReason.CACHING_OFF)
        if not cache_use.reads:
            return _Finding(MissReason.NOT_READ)
        num_tokens, index = len(prompt.token_ids), len(plan.hits)
        if index == num_usable_blocks(num_tokens, full_hit, self._pool.block_size):
            is_full = num_tokens % self._pool.block_size == 0
            return _Finding(MissReason.LEFT_TO_COMPUTE if is_full else MissReason.NOT_FULL)
        if plan.num_pending_tokens:
            return _Finding(MissReason.PENDING)
        if self._pool.block_of(prompt.chain.hashes[index]) is not None:
            is_match = len(self._pool.match(prompt.chain, index + 1)) > index
            return _Finding(MissReason.RESERVED if is_match else MissReason.COLLISION)
        return self._of_live_sequences(prompt, index) or self._of_the_past(prompt, plan)

    def _of_live_sequences(self, prompt: Prompt, index: int) -> _Finding | None:
        """One that has the block, and why nobody finds it."""
        size = self._pool.block_size
        start, end = index * size, (index + 1) * size
        last = uint32_array(prompt.token_ids[start:end])
        for sequence in islice(reversed(self._live.by_id.values()), MAX_SEQUENCES):
            if _has_block(sequence, prompt, last, start, size):
                can_be = sequence.registers
                return _Finding(MissReason.NOT_COMMITTED if can_be else MissReason.NOT_WRITTEN)
        return None

    def _of_the_past(self, prompt: Prompt, plan: Plan) -> _Finding:
        assert prompt.chain is not None
        past = self._pool.past_of(prompt.chain.hashes[len(plan.hits)])
        if past.evicted_s is not None:
            return _Finding(MissReason.EVICTED, age_s=past.evicted_s)
        if past.dropped_s is not None:
            return _Finding(MissReason.RESET, age_s=past.dropped_s)
        size = self._pool.block_size
        missed = MissedBlock.of(prompt, plan.hits, size)
        near = self._nearest.find(missed)
        if near is None:
            return _Finding(MissReason.NEVER_CACHED if past.is_complete else MissReason.UNKNOWN)
        start = missed.index * size
        return _Finding(
            MissReason.DIVERGED,
            first_different_token=start + near.num_equal if near.num_equal < size else None,
            key_differences=_key_differences(missed.encoded_keys(), near.extra_keys, start),
        )


def _has_block(sequence: Sequence, prompt: Prompt, last: array[int], start: int, size: int) -> bool:
    """Whether it has the prompt's tokens and keys from the start on up to a block's end.

    last: the tokens of that block, which begins at `start`.
    """
    end = start + size
    if sequence.token_ids[start:end] != last:
        return False
    if not sequence.has_tokens(0, prompt.token_ids[:end]):
        return False
    return block_extra_keys(sequence.extra_keys, 0, end // size, size) == block_extra_keys(
        prompt.extra_keys, 0, end // size, size
    )


def _key_differences(own: bytes, cached: bytes, start: int) -> tuple[KeyDifference, ...]:
    """Between the encoded keys of two blocks that begin at token `start`. Tells of no tenant."""
    mine, theirs = _by_tag(own), _by_tag(cached)
    return tuple(
        KeyDifference(kind, _shown(show, mine[tag], start), _shown(show, theirs[tag], start))
        for tag, (kind, show) in _KINDS.items()
        if mine[tag] != theirs[tag]
    )


def _by_tag(encoded: bytes) -> dict[str, list[Any]]:
    """What follows the tag in each key, by the tags that are shown."""
    found: dict[str, list[Any]] = {tag: [] for tag in _KINDS}
    for tag, *values in cbor2.loads(encoded) if encoded else ():
        if tag in found:
            found[tag].append(values)
    return found


def _shown(show: Callable[[list[Any], int], str], keys: list[Any], start: int) -> str:
    return ", ".join(show(values, start) for values in keys)


def _lora(values: list[Any], start: int) -> str:
    name, path = values
    return f"{name} ({path})" if path else str(name)


def _item(values: list[Any], start: int) -> str:
    identifier, offset = values
    return f"{identifier} at token {start + offset}"


def _salt(values: list[Any], start: int) -> str:
    """Not the salt itself: who knows it finds what is cached under it."""
    return "sha256:" + hashlib.sha256(values[0].encode()).hexdigest()[:_DIGEST_DIGITS]


def _embeds(values: list[Any], start: int) -> str:
    digest: bytes = values[0]
    return "sha256:" + digest.hex()[:_DIGEST_DIGITS]


_KINDS: Mapping[str, tuple[KeyKind, Callable[[list[Any], int], str]]] = {
    "lora": (KeyKind.LORA, _lora),
    "mm": (KeyKind.MULTIMODAL_ITEM, _item),
    "cache_salt": (KeyKind.CACHE_SALT, _salt),
    "prompt_embeds": (KeyKind.PROMPT_EMBEDS, _embeds),
}
