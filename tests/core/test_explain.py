"""Why a prompt has no more hits: each reason, and that asking changes nothing."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from prefixcache.core.events import MIN_BUFFER_BYTES, Change, EventLog, Removed, Stored
from prefixcache.core.extra_keys import in_namespace
from prefixcache.core.hashing import HASH_ALGORITHMS, HashAlgorithm
from prefixcache.core.recent_keys import MAX_RECENT
from prefixcache.core.tenants import TenantQuota
from prefixcache.types import (
    NO_EXTRA_KEYS,
    CacheUse,
    Explanation,
    ExtraKeys,
    FullHit,
    KeyDifference,
    KeyKind,
    Lora,
    MissReason,
    MultimodalItem,
    PromptEmbeds,
)
from tests.core.manager import Manager, T, U, image
from tests.support.invariants import snapshot
from tests.support.mirror import split

ADAPTER = ExtraKeys(lora=Lora("adapter", "v2"))
SALTED = ExtraKeys(cache_salt="a secret")
_SECRET = "sha256:" + hashlib.sha256(b"a secret").hexdigest()[:16]


def explain(
    manager: Manager,
    tokens: list[int],
    extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    full_hit: FullHit = FullHit.LAST_TOKEN,
    **options: Any,
) -> Explanation:
    """What Explain says, which has changed nothing and agrees with Lookup."""
    before, ages = snapshot(manager.sequences), manager.pool.ages()
    prompt = manager.sequences.prepare(np.array(tokens, dtype=np.uint32), extra_keys)
    found = manager.sequences.explain(prompt, full_hit, **options)
    assert manager.sequences.explain(prompt, full_hit, **options) == found
    assert (snapshot(manager.sequences), manager.pool.ages()) == (before, ages)
    if options.get("cache_use", CacheUse.READ_WRITE).reads:
        account = options.get("account", 0)
        looked = manager.lookup(tokens, extra_keys, full_hit=full_hit, account=account)
        assert found.num_cached_tokens == looked.num_cached_tokens
        assert found.num_cached_blocks == looked.num_cached_blocks
        assert found.num_pending_tokens == looked.num_pending_tokens
    return found


def reason(manager: Manager, tokens: list[int], *arguments: Any, **options: Any) -> MissReason:
    return explain(manager, tokens, *arguments, **options).reason


def evict_all(manager: Manager) -> None:
    manager.pool.release(manager.pool.take(manager.pool.num_free))


@pytest.fixture(params=[False, True], ids=["hashes", "verified"])
def manager(request: pytest.FixtureRequest) -> Manager:
    return Manager(32, verify_hits=request.param)


# ---- what the prompt asks for


@pytest.mark.parametrize("full_hit", FullHit)
def test_of_a_full_hit_the_end_is_left_to_compute(manager: Manager, full_hit: FullHit) -> None:
    manager.fill(T(8))
    found = explain(manager, T(8), full_hit=full_hit)
    assert found.reason is MissReason.LEFT_TO_COMPUTE
    assert found.num_cached_blocks == (2 if full_hit is FullHit.LAST_TOKEN else 1)


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 9])
def test_tokens_that_fill_no_block_are_not_cached(manager: Manager, num_tokens: int) -> None:
    manager.fill(T(8))
    found = explain(manager, T(num_tokens))
    assert found.reason is MissReason.NOT_FULL
    assert found.block_hash == b""
    assert found.num_cached_blocks == num_tokens // 4


def test_with_caching_off_nothing_is_cached() -> None:
    assert reason(Manager(8, caching=False), T(8)) is MissReason.CACHING_OFF


@pytest.mark.parametrize("cache_use", [CacheUse.NO_READ, CacheUse.NONE])
def test_a_prompt_that_does_not_read_has_no_hits(manager: Manager, cache_use: CacheUse) -> None:
    manager.fill(T(8))
    assert reason(manager, T(8), cache_use=cache_use) is MissReason.NOT_READ
    assert reason(manager, T(8), cache_use=CacheUse.NO_WRITE) is MissReason.LEFT_TO_COMPUTE


# ---- live sequences


def test_what_a_live_sequence_computes_is_pending(manager: Manager) -> None:
    manager.fill(T(4))
    held = manager.allocate(T(12))
    found = explain(manager, T(12))
    assert (found.reason, found.num_pending_tokens) == (MissReason.PENDING, 7)
    manager.commit(held, until=11)
    assert reason(manager, T(12)) is MissReason.PENDING
    manager.commit(held)
    assert reason(manager, T(12)) is MissReason.LEFT_TO_COMPUTE


def test_a_block_that_decoding_has_filled_is_not_committed_at_first(manager: Manager) -> None:
    held = manager.allocate(T(7))
    manager.commit(held)
    manager.append(held, [8])
    assert reason(manager, T(9)) is MissReason.NOT_COMMITTED
    assert reason(manager, [*T(7), 0, 0]) is MissReason.NEVER_CACHED
    manager.commit(held)
    assert reason(manager, T(9)) is MissReason.NOT_FULL


@pytest.mark.parametrize("cache_use", [CacheUse.NO_WRITE, CacheUse.NONE])
def test_a_live_sequence_that_writes_nothing_never_caches_its_blocks(
    manager: Manager, cache_use: CacheUse
) -> None:
    held = manager.allocate(T(9), cache_use=cache_use)
    manager.commit(held)
    assert reason(manager, T(9)) is MissReason.NOT_WRITTEN
    assert reason(manager, T(9), ADAPTER) is MissReason.NEVER_CACHED
    assert reason(manager, [*T(4), 0, 6, 7, 8], cache_use=CacheUse.READ_WRITE) is (
        MissReason.NOT_WRITTEN
    )
    manager.free(held)
    assert reason(manager, T(9)) is MissReason.NEVER_CACHED


def test_a_sequence_that_lived_through_a_reset_never_caches_its_blocks(manager: Manager) -> None:
    held = manager.allocate(T(8))
    manager.commit(held)
    manager.sequences.reset(force=True)
    assert reason(manager, T(8)) is MissReason.NOT_WRITTEN
    manager.clock_s += 3
    manager.free(held)
    found = explain(manager, T(8))
    assert (found.reason, found.age_s) == (MissReason.RESET, 3.0)


# ---- the past


def test_an_evicted_block_says_how_long_ago(manager: Manager) -> None:
    manager.fill(T(12))
    manager.clock_s += 5
    for _ in range(30):  # the deepest of the chain is the first to go
        manager.pool.take(1)
    manager.clock_s += 61.5
    found = explain(manager, T(12))
    assert (found.num_cached_blocks, found.reason) == (2, MissReason.EVICTED)
    assert found.age_s == 61.5


def test_an_evicted_block_that_is_back_and_evicted_again_has_the_last_age(manager: Manager) -> None:
    manager.fill(T(4))
    evict_all(manager)
    manager.clock_s += 10
    manager.fill(T(4))
    evict_all(manager)
    manager.clock_s += 2
    assert explain(manager, T(5)).age_s == 2.0


def test_what_was_there_at_a_reset_is_said_and_what_was_not_is_not(manager: Manager) -> None:
    manager.fill(T(8))
    manager.clock_s += 1
    manager.sequences.reset(force=False)
    manager.clock_s += 7
    found = explain(manager, T(8))
    assert (found.num_cached_blocks, found.reason, found.age_s) == (0, MissReason.RESET, 7.0)
    assert reason(manager, U(8)) is MissReason.NEVER_CACHED
    manager.fill(T(4))
    assert (explain(manager, T(8)).num_cached_blocks, reason(manager, T(8))) == (
        1,
        MissReason.RESET,
    )
    evict_all(manager)
    assert explain(manager, T(8)).reason is MissReason.EVICTED


def test_only_the_last_reset_is_remembered(manager: Manager) -> None:
    manager.fill(T(8))
    manager.sequences.reset(force=False)
    manager.fill(U(8))
    manager.sequences.reset(force=False)
    assert reason(manager, T(8)) is MissReason.NEVER_CACHED
    assert reason(manager, U(8)) is MissReason.RESET
    manager.sequences.reset(force=False)
    assert reason(manager, U(8)) is MissReason.NEVER_CACHED


def test_a_reset_forgets_evictions(manager: Manager) -> None:
    manager.fill(T(4))
    evict_all(manager)
    manager.sequences.reset(force=False)
    assert reason(manager, T(5)) is MissReason.NEVER_CACHED


def test_evictions_are_forgotten_after_many_and_then_nothing_is_claimed(manager: Manager) -> None:
    manager.fill(T(4))
    evict_all(manager)
    assert reason(manager, U(4)) is MissReason.NEVER_CACHED
    for first in range(10_000, 60_000, 1000):
        manager.fill(list(range(first, first + 4)))
        evict_all(manager)
    assert reason(manager, T(5)) is MissReason.UNKNOWN
    assert reason(manager, U(5)) is MissReason.UNKNOWN


# ---- other content


def test_a_hash_that_other_content_has_is_a_collision() -> None:
    same = HashAlgorithm("sha256_cbor", 32, lambda data: bytes(32), True, False)
    manager = Manager(8, verify_hits=True, algorithm=same)
    manager.fill(T(4))
    assert reason(manager, U(5)) is MissReason.COLLISION


def test_a_hit_whose_room_is_guaranteed_to_others_is_reserved() -> None:
    manager = Manager(8)
    quotas = [TenantQuota("a", "both", 4), TenantQuota("b", "both"), TenantQuota("c", "c", 4)]
    manager.sequences.set_tenants(quotas)
    first, second = (manager.sequences.tenants.account_of(name, "both") for name in ("a", "b"))
    shared = in_namespace(NO_EXTRA_KEYS, "both")
    held = manager.allocate(T(8), shared, account=first)
    manager.commit(held)
    found = explain(manager, T(9), shared, account=second)
    assert (found.num_cached_blocks, found.reason) == (0, MissReason.RESERVED)
    assert explain(manager, T(9), shared, account=first).num_cached_blocks == 2


# ---- tokens


def test_the_first_token_that_differs_is_told_where_hits_are_verified() -> None:
    manager = Manager(32, verify_hits=True)
    manager.fill(T(12))
    manager.fill([*T(6), 66, 77])
    found = explain(manager, [*T(7), 0, *T(4)])
    assert (found.reason, found.num_cached_blocks) == (MissReason.DIVERGED, 1)
    assert (found.first_different_token, found.key_differences) == (7, ())
    assert found.keeps_content
    assert explain(manager, [*T(6), 0, 77, 0]).first_different_token == 6
    assert explain(manager, [*T(4), *U(8)]).first_different_token == 4
    assert explain(manager, [*T(2), *U(8)]).first_different_token == 2
    assert reason(manager, U(8)) is MissReason.NEVER_CACHED  # nothing begins as it does
    assert reason(manager, T(16)) is MissReason.NEVER_CACHED  # and nothing follows


def test_tokens_of_live_sequences_are_compared_where_hits_are_not_verified() -> None:
    manager = Manager(32)
    held = manager.allocate(T(12))
    asked = [*T(7), 0, *T(4)]
    manager.commit(held, until=4)
    assert reason(manager, asked) is MissReason.NEVER_CACHED  # its block is not cached yet
    manager.commit(held)
    other = manager.allocate([*T(5), 0, 0, 0])
    manager.commit(other)
    found = explain(manager, asked)
    assert (found.reason, found.first_different_token) == (MissReason.DIVERGED, 7)
    assert not found.keeps_content
    assert explain(manager, [*T(2), *U(8)]).first_different_token == 2
    assert reason(manager, U(8)) is MissReason.NEVER_CACHED
    manager.free(held, other)
    assert reason(manager, asked) is MissReason.NEVER_CACHED


def test_a_chain_that_follows_another_block_is_not_near(manager: Manager) -> None:
    held = manager.allocate([*U(4), *T(8)])
    manager.commit(held)
    manager.fill(T(4))
    assert reason(manager, [*T(4), *T(3), 0]) is MissReason.NEVER_CACHED


# ---- extra keys


@pytest.mark.parametrize(
    ("cached", "asked", "difference"),
    [
        (ADAPTER, NO_EXTRA_KEYS, KeyDifference(KeyKind.LORA, "", "adapter (v2)")),
        (NO_EXTRA_KEYS, ADAPTER, KeyDifference(KeyKind.LORA, "adapter (v2)", "")),
        (
            ADAPTER,
            ExtraKeys(lora=Lora("adapter")),
            KeyDifference(KeyKind.LORA, "adapter", "adapter (v2)"),
        ),
        (SALTED, NO_EXTRA_KEYS, KeyDifference(KeyKind.CACHE_SALT, "", _SECRET)),
        (NO_EXTRA_KEYS, SALTED, KeyDifference(KeyKind.CACHE_SALT, _SECRET, "")),
        (
            image("a cat", 2, 3),
            image("a dog", 2, 3),
            KeyDifference(KeyKind.MULTIMODAL_ITEM, "a dog at token 2", "a cat at token 2"),
        ),
        (
            image("a cat", 2, 3),
            NO_EXTRA_KEYS,
            KeyDifference(KeyKind.MULTIMODAL_ITEM, "", "a cat at token 2"),
        ),
        (
            NO_EXTRA_KEYS,
            image("a dog", 2, 3),
            KeyDifference(KeyKind.MULTIMODAL_ITEM, "a dog at token 2", ""),
        ),
        (
            ExtraKeys(prompt_embeds=(PromptEmbeds(0, 4, (b"a" * 32,)),)),
            ExtraKeys(prompt_embeds=(PromptEmbeds(0, 4, (b"b" * 32,)),)),
            KeyDifference(
                KeyKind.PROMPT_EMBEDS, "sha256:6262626262626262", "sha256:6161616161616161"
            ),
        ),
    ],
)
def test_the_same_tokens_under_other_keys_are_found(
    manager: Manager, cached: ExtraKeys, asked: ExtraKeys, difference: KeyDifference
) -> None:
    manager.fill(T(8), cached)
    found = explain(manager, T(9), asked)
    assert (found.num_cached_blocks, found.reason) == (0, MissReason.DIVERGED)
    assert found.first_different_token is None
    assert found.key_differences == (difference,)


def test_an_image_differs_in_the_first_block_that_it_is_in(manager: Manager) -> None:
    manager.fill(T(12), image("a cat", 6, 4))
    found = explain(manager, T(13), image("a dog", 6, 4))
    assert (found.num_cached_blocks, found.reason) == (1, MissReason.DIVERGED)
    assert found.key_differences == (
        KeyDifference(KeyKind.MULTIMODAL_ITEM, "a dog at token 6", "a cat at token 6"),
    )


def test_an_image_of_an_append_is_found(manager: Manager) -> None:
    held = manager.allocate(T(4))
    manager.append(held, T(8)[4:], extra_keys=image("a cat", 5, 2))
    manager.commit(held)
    manager.free(held)
    found = explain(manager, T(9), image("a dog", 5, 2))
    assert found.reason is MissReason.DIVERGED
    assert found.key_differences[0].in_cache == "a cat at token 5"


def test_adapter_and_salt_may_both_differ(manager: Manager) -> None:
    manager.fill(T(8), ExtraKeys(lora=Lora("adapter"), cache_salt="salt"))
    found = explain(manager, T(9), ExtraKeys(lora=Lora("other")))
    assert [key.kind for key in found.key_differences] == [KeyKind.LORA, KeyKind.CACHE_SALT]


def test_tokens_and_keys_may_both_differ_where_hits_are_verified() -> None:
    manager = Manager(16, verify_hits=True)
    manager.fill(T(8), ADAPTER)
    found = explain(manager, [*T(3), 0, 5])
    assert (found.first_different_token, len(found.key_differences)) == (3, 1)
    manager.fill([*T(3), 9])  # as near, and with the same keys
    found = explain(manager, [*T(3), 0, 5])
    assert (found.first_different_token, found.key_differences) == (3, ())


def test_keys_that_nobody_had_lately_are_known_where_hits_are_verified_only(
    manager: Manager,
) -> None:
    manager.fill(T(4), ADAPTER)
    held = manager.allocate(T(4), ADAPTER)  # keeps it from being evicted
    for number in range(MAX_RECENT):
        manager.fill(U(4), ExtraKeys(cache_salt=f"salt {number}"))
    manager.free(held)
    is_known = manager.pool.keeps_content
    assert (reason(manager, T(5)) is MissReason.DIVERGED) == is_known


@pytest.mark.parametrize("cached", [NO_EXTRA_KEYS, ADAPTER, SALTED, image("a cat", 0, 4)])
@pytest.mark.parametrize("is_live", [False, True])
def test_nothing_of_another_namespace_is_told(
    manager: Manager, cached: ExtraKeys, is_live: bool
) -> None:
    mine, theirs = in_namespace(NO_EXTRA_KEYS, "mine"), in_namespace(cached, "theirs")
    held = manager.allocate([*T(6), 0, 0], theirs)
    if is_live:
        assert reason(manager, [*T(6), 0, 0], mine) is MissReason.NEVER_CACHED
    manager.commit(held)
    if not is_live:
        manager.free(held)
    for tokens in (T(9), [*T(6), 0, 0], T(4), T(5)):
        for keys in (mine, NO_EXTRA_KEYS):
            found = explain(manager, tokens, keys)
            assert found.reason is MissReason.NEVER_CACHED
            assert (found.first_different_token, found.key_differences) == (None, ())
    evict_all(manager)
    for keys in (mine, NO_EXTRA_KEYS):
        assert reason(manager, T(9), keys) is MissReason.NEVER_CACHED


def test_within_a_namespace_everything_is_told_but_the_namespace(manager: Manager) -> None:
    manager.fill(T(8), in_namespace(ADAPTER, "mine"))
    found = explain(manager, T(9), in_namespace(SALTED, "mine"))
    assert [key.kind for key in found.key_differences] == [KeyKind.LORA, KeyKind.CACHE_SALT]
    assert "mine" not in str(found)


def test_items_of_later_blocks_do_not_hide_what_the_first_one_differs_in(manager: Manager) -> None:
    items = (MultimodalItem("one", 0, 2), MultimodalItem("two", 8, 2))
    manager.fill(T(12), ExtraKeys(multimodal_items=items))
    found = explain(manager, T(13), image("two", 8, 2))
    assert found.key_differences == (KeyDifference(KeyKind.MULTIMODAL_ITEM, "", "one at token 0"),)


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_all_recipes_are_explained_alike(name: str) -> None:
    manager = Manager(32, verify_hits=True, algorithm=HASH_ALGORITHMS[name])
    manager.fill(T(8), ADAPTER)
    assert explain(manager, T(9)).key_differences[0].in_cache == "adapter (v2)"
    evict_all(manager)
    assert reason(manager, T(9), ADAPTER) is MissReason.EVICTED
    manager.fill(T(8))
    manager.sequences.reset(force=False)
    assert reason(manager, T(9)) is MissReason.RESET


def test_a_pool_of_one_block_is_explained() -> None:
    manager = Manager(1)
    assert reason(manager, T(5)) is MissReason.NEVER_CACHED
    manager.fill(T(4))
    manager.fill(U(4))
    assert reason(manager, T(5)) is MissReason.EVICTED


class History:
    """What has happened to each hash since the last reset, from the pool's events."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._next_number = 0
        self.cached: set[bytes] = set()
        self.evicted: set[bytes] = set()
        self.dropped: set[bytes] = set()

    def follow(self) -> None:
        while events := self._log.read(self._next_number):
            for event in events:
                self._apply(event.change)
            self._next_number = events[-1].number + 1

    def _apply(self, change: Change) -> None:
        match change:
            case Stored(hashes):
                self.cached.update(split(hashes, 32))
            case Removed(hashes):
                self.cached.difference_update(split(hashes, 32))
                self.evicted.update(split(hashes, 32))
            case _:
                self.dropped, self.cached, self.evicted = self.cached, set(), set()

    def may_be(self, found: Explanation) -> bool:
        """Whether the reason is true, of a prompt without live sequences that have it."""
        missed, was_evicted = found.block_hash, found.block_hash in self.evicted
        match found.reason:
            case MissReason.LEFT_TO_COMPUTE | MissReason.NOT_FULL:
                return not missed or missed in self.cached
            case MissReason.EVICTED:
                return was_evicted and missed not in self.cached
            case MissReason.RESET:
                return missed in self.dropped - self.cached
            case MissReason.NEVER_CACHED:
                return not was_evicted and missed not in self.cached | self.dropped
            case MissReason.DIVERGED | MissReason.UNKNOWN:
                return missed not in self.cached | self.dropped
        return False


@pytest.mark.parametrize("verify_hits", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_of_the_past_is_true(seed: int, verify_hits: bool) -> None:
    rng = random.Random(seed)
    log = EventLog(MIN_BUFFER_BYTES)
    manager = Manager(24, 2, verify_hits=verify_hits, events=log)
    history, seen = History(log), Counter[MissReason]()
    all_keys = (NO_EXTRA_KEYS, NO_EXTRA_KEYS, ADAPTER, SALTED)

    def prompt() -> tuple[list[int], ExtraKeys]:
        length = rng.randint(1, 12)
        return [rng.choice((1, 1, 1, 2)) for _ in range(length)], rng.choice(all_keys)

    for _ in range(300):
        manager.clock_s += 1
        if rng.random() < 0.02:
            manager.sequences.reset(force=False)
        else:
            manager.fill(*prompt())
        history.follow()
        for _ in range(3):
            found = explain(manager, *prompt())
            assert history.may_be(found), found
            seen[found.reason] += 1
    needed = {MissReason.EVICTED, MissReason.RESET, MissReason.DIVERGED, MissReason.NEVER_CACHED}
    assert needed <= seen.keys()
