"""What the pool observes of its blocks' ages, on a clock that the test moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from prefixcache.core.block_ages import BOUNDS_S, BlockAges
from prefixcache.core.hashing import HASH_ALGORITHMS, Chain, Hasher
from prefixcache.core.histogram import Histogram
from prefixcache.core.pool import Pool
from prefixcache.types import NO_EXTRA_KEYS, BlockIds
from tests.core.manager import Manager

SIZE = 2
NOTHING = Histogram(BOUNDS_S, (0,) * (len(BOUNDS_S) + 1), 0.0)


class Timed:
    """A pool and its clock."""

    def __init__(self, num_blocks: int) -> None:
        self.now_s = 1000.0
        self.pool = Pool(num_blocks, SIZE, False, clock=lambda: self.now_s)
        self.hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], "a seed of the tests", SIZE)

    @property
    def ages(self) -> BlockAges:
        return self.pool.ages()

    def chain(self, first: int, num_blocks: int) -> Chain:
        tokens = np.arange(first, first + num_blocks * SIZE, dtype=np.uint32)
        return self.hasher.chain(None, tokens, NO_EXTRA_KEYS)

    def held(self, chain: Chain) -> BlockIds:
        blocks = self.pool.take(len(chain.hashes))
        self.pool.register(blocks, chain, None)
        return blocks

    def cached(self, chain: Chain) -> BlockIds:
        """Registered and let go, at once."""
        blocks = self.held(chain)
        self.pool.release(blocks)
        return blocks

    def ask(self, chain: Chain) -> BlockIds:
        """As Allocate does; the hits, which stay referenced."""
        hits = self.pool.match(chain, len(chain.hashes))
        self.pool.acquire_hits(hits, chain)
        return hits

    def evict_all(self) -> None:
        self.pool.release(self.pool.take(self.pool.num_free))


def only(*values: float) -> Histogram:
    """A histogram of these values."""
    counts = [0] * (len(BOUNDS_S) + 1)
    for value in values:
        counts[sum(value > bound for bound in BOUNDS_S)] += 1
    return Histogram(BOUNDS_S, tuple(counts), sum(values))


def test_a_pool_that_has_evicted_nothing_and_was_not_hit_has_observed_nothing() -> None:
    timed = Timed(4)
    timed.cached(timed.chain(0, 2))
    timed.pool.take(1)
    timed.ask(timed.chain(100, 1))
    assert timed.ages == BlockAges(NOTHING, NOTHING, NOTHING, NOTHING)


def test_an_evicted_block_has_lived_since_it_was_findable_and_idled_since_it_was_let_go() -> None:
    timed = Timed(2)
    blocks = timed.pool.take(2)
    timed.now_s += 500  # Until they are findable they have no age.
    timed.pool.register(blocks, timed.chain(0, 2), None)
    timed.now_s += 10
    timed.pool.release(blocks)
    timed.now_s += 60
    timed.pool.take(1)
    timed.now_s += 1
    timed.pool.take(1)
    assert timed.ages.lifetime == only(70, 71)
    assert timed.ages.idle_before_evict == only(60, 61)


@pytest.mark.parametrize("age", [0.0, 0.125, 1.0, 1.015625, 604800.0, 604801.0, 4e7])
def test_an_age_counts_in_the_first_bucket_that_it_is_not_above(age: float) -> None:
    timed = Timed(1)
    timed.cached(timed.chain(0, 1))
    timed.now_s += age
    timed.evict_all()
    assert timed.ages.lifetime == timed.ages.idle_before_evict == only(age)


def test_the_gap_of_a_hit_is_since_the_last_use() -> None:
    timed = Timed(4)
    chain = timed.chain(0, 2)
    blocks = timed.held(chain)
    timed.now_s += 3
    assert timed.ask(chain).tolist() == blocks.tolist()  # since it was findable: 3
    timed.now_s += 4
    timed.pool.release(blocks)  # Another holder is left, so it goes on being used.
    timed.ask(chain)  # since the hit before: 4
    timed.now_s += 5
    timed.pool.release(blocks)
    timed.pool.release(blocks)
    timed.now_s += 7
    timed.ask(chain)  # since it was let go: 7
    assert timed.ages.reuse_gap == only(3, 3, 4, 4, 7, 7)


def test_a_hit_begins_the_idle_time_anew_and_not_the_life() -> None:
    timed = Timed(1)
    timed.cached(timed.chain(0, 1))
    timed.now_s += 100
    timed.pool.release(timed.ask(timed.chain(0, 1)))
    timed.now_s += 20
    timed.evict_all()
    assert timed.ages.lifetime == only(120)
    assert timed.ages.idle_before_evict == only(20)


def test_a_standby_takes_the_age_over_and_its_block_was_not_evicted() -> None:
    timed = Timed(2)
    chain = timed.chain(0, 1)
    first = timed.held(chain)
    timed.now_s += 10
    standby = timed.held(chain)
    timed.pool.release(first)
    timed.now_s += 10
    taken = timed.pool.take(1)
    assert taken.tolist() == first.tolist()
    assert timed.ages.lifetime == NOTHING
    timed.now_s += 10
    timed.pool.release(standby)
    timed.now_s += 5
    timed.pool.take(1)
    assert timed.ages.lifetime == only(35)
    assert timed.ages.idle_before_evict == only(5)


def test_a_standby_that_is_let_go_uses_the_block_that_it_stood_by_for() -> None:
    timed = Timed(2)
    chain = timed.chain(0, 1)
    timed.cached(chain)
    standby = timed.held(chain)
    timed.now_s += 10
    timed.pool.release(standby)
    timed.now_s += 3
    timed.evict_all()
    assert timed.ages.idle_before_evict == only(3)


def test_a_fork_and_a_lookup_use_nothing() -> None:
    manager = Manager(8, 2)
    sequence = manager.allocate(list(range(4)))
    manager.commit(sequence)
    manager.fork(sequence)
    manager.lookup(list(range(5)))
    assert manager.pool.ages().reuse_gap == NOTHING
    manager.allocate(list(range(5)))
    assert manager.pool.ages().reuse_gap.count == 2


# ---- ghosts


def test_an_evicted_block_that_is_asked_for_again_is_missed_since_then() -> None:
    timed = Timed(3)
    chain = timed.chain(0, 3)
    timed.cached(chain)
    timed.pool.take(2)  # the two deepest
    timed.now_s += 30
    assert len(timed.ask(chain)) == 1
    assert timed.ages.evict_to_reuse == only(30, 30)
    timed.now_s += 10
    timed.ask(chain)  # It was not computed meanwhile: missed again.
    assert timed.ages.evict_to_reuse == only(30, 30, 40, 40)


def test_blocks_that_were_never_cached_are_not_missed() -> None:
    timed = Timed(2)
    timed.cached(timed.chain(0, 2))
    timed.evict_all()
    timed.ask(timed.chain(100, 2))
    assert timed.ages.evict_to_reuse == NOTHING


def test_a_block_that_came_back_is_a_hit_and_missed_no_more() -> None:
    timed = Timed(2)
    chain = timed.chain(0, 2)
    timed.cached(chain)
    timed.evict_all()
    timed.cached(chain)
    timed.ask(chain)
    assert timed.ages.evict_to_reuse == NOTHING
    assert timed.ages.reuse_gap == only(0, 0)
    # Of a chain whose end is not taken, though it is there, it is not missed either.
    timed.pool.acquire_hits(timed.pool.match(chain, 1), chain)
    assert timed.ages.evict_to_reuse == NOTHING


def test_a_block_that_was_evicted_twice_is_missed_since_the_second_time() -> None:
    timed = Timed(1)
    chain = timed.chain(0, 1)
    for _ in range(2):
        timed.cached(chain)
        timed.now_s += 10
        timed.evict_all()
    timed.now_s += 3
    timed.ask(chain)
    assert timed.ages.evict_to_reuse == only(3)


def test_a_reset_is_no_eviction_and_forgets_them() -> None:
    timed = Timed(4)
    old, new = timed.chain(0, 2), timed.chain(100, 2)
    timed.cached(old)
    timed.evict_all()
    timed.cached(new)
    evicted = timed.ages
    timed.pool.clear()
    timed.ask(old)
    timed.ask(new)
    assert timed.ages == evicted


def test_as_many_evictions_as_a_fifth_of_the_pool_are_remembered_and_old_ones_forgotten() -> None:
    num_blocks = 4000
    timed = Timed(num_blocks)
    chains = [timed.chain(number * 1000, 50) for number in range(400)]  # five pools' worth
    for chain in chains:
        timed.cached(chain)
    timed.evict_all()
    recent, old = chains[-16:], chains[:160]  # a fifth of the pool, and two pools
    for chain in recent:
        timed.ask(chain)
    remembered = timed.ages.evict_to_reuse.count
    assert 0.98 <= remembered / 800 <= 1
    for chain in old:
        timed.ask(chain)
    assert timed.ages.evict_to_reuse.count - remembered < 0.01 * 8000


@pytest.mark.parametrize("num_blocks", [1, 2, 12, 13, 14, 100])
def test_pools_of_any_size_remember(num_blocks: int) -> None:
    timed = Timed(num_blocks)
    chain = timed.chain(0, 1)
    timed.cached(chain)
    timed.evict_all()
    timed.ask(chain)
    assert timed.ages.evict_to_reuse == only(0)


def test_every_eviction_is_observed() -> None:
    timed = Timed(7)
    for number in itertools.chain(range(5), range(3), range(5)):
        timed.now_s += 1
        timed.pool.release(timed.ask(timed.chain(number * 100, 2)))
        timed.cached(timed.chain(number * 100, 2))
    assert timed.pool.num_evictions > 0
    assert timed.ages.lifetime.count == timed.pool.num_evictions
    assert timed.ages.idle_before_evict.count == timed.pool.num_evictions


def test_a_chain_is_looked_for_over_a_short_gap_and_not_beyond_a_long_one() -> None:
    timed = Timed(64)
    chain = timed.chain(0, 30)
    for first, last in ((0, 10), (17, 20), (28, 30)):  # as if the rest had been forgotten
        part = Chain(chain.hashes[first:last], chain.token_ids[first * SIZE : last * SIZE], None)
        blocks = timed.pool.take(last - first)
        timed.pool.register(blocks, part, None)
        timed.pool.release(blocks)
    timed.evict_all()
    timed.ask(chain)
    assert timed.ages.evict_to_reuse.count == 10 + 3
