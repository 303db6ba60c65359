"""The pool by itself: references, registration, standbys, eviction order, size in memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from prefixcache.core.form import FORM
from prefixcache.core.hashing import HASH_ALGORITHMS, Chain, HashAlgorithm, Hasher
from prefixcache.core.pool import PLAIN, REGISTERED, STANDBY, Pool
from prefixcache.types import NO_EXTRA_KEYS, BlockIds, ExtraKeys

SEED = "a seed of the tests"
BYTES_NEW = {"native": 100, "python": 45}
"""A block of a pool that was just made. The columns of the compiled form have their full length."""
BYTES_FULL = {"native": 100, "python": 250}
CONSTANT = HashAlgorithm("constant", 32, lambda data: b"\x00" * 32, True, False)


def chain_of(
    tokens: list[int],
    extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    algorithm: HashAlgorithm = HASH_ALGORITHMS["sha256_cbor"],
) -> Chain:
    hasher = Hasher(algorithm, SEED, 2)
    return hasher.chain(None, np.array(tokens, dtype=np.uint32), extra_keys)


def filled(pool: Pool, chain: Chain) -> BlockIds:
    """Blocks with the chain's content, registered and still referenced."""
    blocks = pool.take(len(chain.hashes))
    pool.register(blocks, chain, None)
    return blocks


def test_a_new_pool_is_blank_and_gives_blocks_in_the_order_of_their_ids() -> None:
    pool = Pool(4, 2, False)
    assert (pool.num_free, pool.num_blank, pool.num_evictable, pool.num_cached) == (4, 4, 0, 0)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.num_referenced == 3
    assert pool.ref_cnt.tolist() == [1, 1, 1, 0]


def test_match_gives_the_longest_cached_prefix_and_changes_nothing() -> None:
    pool = Pool(8, 2, False)
    blocks = filled(pool, chain_of([1, 2, 3, 4, 5, 6]))
    pool.release(blocks)
    before = pool.free_order().tolist()
    assert pool.match(chain_of([1, 2, 3, 4, 9, 9]), 3).tolist() == blocks[:2].tolist()
    assert pool.match(chain_of([1, 2, 3, 4, 5, 6]), 1).tolist() == blocks[:1].tolist()
    assert pool.match(chain_of([9, 9, 3, 4]), 2).tolist() == []
    assert pool.free_order().tolist() == before
    assert not pool.ref_cnt.any()


def test_released_blocks_go_deepest_first_cached_to_the_tail_and_blank_to_the_head() -> None:
    pool = Pool(8, 2, False)
    cached = filled(pool, chain_of([1, 2, 3, 4]))
    private = pool.take(2)
    pool.release(np.concatenate((cached, private)))
    assert pool.free_order().tolist() == [3, 2, 4, 5, 6, 7, 1, 0]


def test_a_block_with_holders_left_stays() -> None:
    pool = Pool(4, 2, False)
    blocks = filled(pool, chain_of([1, 2, 3, 4]))
    pool.acquire(blocks[:1])
    pool.release(blocks)
    assert pool.ref_cnt[blocks].tolist() == [1, 0]
    assert pool.free_order().tolist() == [2, 3, 1]


def test_acquire_takes_a_free_block_out_of_the_queue_and_counts_it_idle_before() -> None:
    pool = Pool(4, 2, False)
    blocks = filled(pool, chain_of([1, 2, 3, 4]))
    pool.release(blocks)
    assert pool.count_hits(blocks).num_free == 2
    pool.acquire(blocks)
    assert pool.count_hits(blocks).num_free == 0
    assert (pool.num_free, pool.num_evictable) == (2, 0)


def test_taking_evicts_the_oldest_and_unregisters_it() -> None:
    pool = Pool(2, 2, False)
    chain = chain_of([1, 2, 3, 4])
    pool.release(filled(pool, chain))
    assert pool.take(1).tolist() == [1]
    assert pool.num_evictions == 1
    assert pool.block_of(chain.hashes[1]) is None
    assert pool.hash_of(1) is None
    assert pool.match(chain, 2).tolist() == [0]


def test_the_second_block_of_one_content_stands_by_and_stays_private() -> None:
    pool = Pool(6, 2, False)
    chain = chain_of([1, 2])
    first, second = filled(pool, chain), filled(pool, chain)
    assert pool.state_of(first[0]) == REGISTERED
    assert pool.state_of(second[0]) == STANDBY
    assert pool.block_of(chain.hashes[0]) == first[0]
    assert pool.hash_of(second[0]) == chain.hashes[0]
    assert pool.num_cached == 1
    assert not pool.is_private(int(second[0]))


def test_a_standby_takes_over_when_the_registered_block_is_evicted() -> None:
    pool = Pool(2, 2, False)
    chain = chain_of([1, 2])
    first, second = filled(pool, chain), filled(pool, chain)
    pool.release(first)
    taken = pool.take(1)
    assert taken.tolist() == first.tolist()
    assert pool.num_evictions == 0
    assert pool.match(chain, 1).tolist() == second.tolist()
    assert pool.state_of(second[0]) == REGISTERED
    assert pool.state_of(first[0]) == PLAIN
    pool.release(second)
    assert pool.num_evictable == 1


def test_standbys_take_over_in_the_order_in_which_they_came() -> None:
    pool = Pool(3, 2, False)
    chain = chain_of([1, 2])
    first, second, third = (filled(pool, chain) for _ in range(3))
    pool.release(first)
    pool.take(1)
    assert pool.match(chain, 1).tolist() == second.tolist()
    pool.release(second)
    pool.take(1)
    assert pool.match(chain, 1).tolist() == third.tolist()
    assert pool.num_evictions == 0
    pool.release(third)
    pool.take(1)
    assert pool.num_evictions == 1


def test_a_released_standby_is_blank_at_the_head_and_its_registered_block_is_young_again() -> None:
    pool = Pool(5, 2, False)
    first = filled(pool, chain_of([1, 2]))
    other = filled(pool, chain_of([7, 8]))
    second = filled(pool, chain_of([1, 2]))
    pool.release(first)
    pool.release(other)
    assert pool.free_order().tolist() == [3, 4, 0, 1]
    pool.release(second)
    assert pool.free_order().tolist() == [2, 3, 4, 1, 0]
    assert (pool.num_evictable, pool.num_blank) == (2, 3)
    assert pool.hash_of(2) is None


def test_a_released_standby_leaves_a_referenced_registered_block_where_it_is() -> None:
    pool = Pool(4, 2, False)
    first, second = (filled(pool, chain_of([1, 2])) for _ in range(2))
    pool.release(second)
    assert pool.free_order().tolist() == [1, 2, 3]
    assert pool.ref_cnt[first].tolist() == [1]


def test_registered_and_standby_blocks_of_one_table_go_to_the_tail_in_their_turns() -> None:
    """[registered here, standby, registered here]: the middle one's twin moves between them."""
    pool = Pool(6, 2, False)
    chain = chain_of([1, 2, 3, 4, 5, 6])
    twin = pool.take(2)
    head = Chain(chain.hashes[:2], chain.token_ids[:4], None)
    pool.register(twin, head, None)
    mine = pool.take(2)
    pool.register(mine, Chain(chain.hashes[1:], chain.token_ids[2:], None), int(twin[0]))
    assert [pool.state_of(block) for block in mine.tolist()] == [STANDBY, REGISTERED]
    pool.acquire(twin[:1])
    pool.release(twin)
    assert pool.free_order().tolist() == [4, 5, 1]
    pool.release(np.concatenate((twin[:1], mine)))
    assert pool.free_order().tolist() == [2, 4, 5, 3, 1, 0]


def test_clear_forgets_every_hash_and_leaves_blocks_and_order() -> None:
    pool = Pool(5, 2, True)
    chain = chain_of([1, 2])
    held, standby = filled(pool, chain), filled(pool, chain)
    pool.release(filled(pool, chain_of([7, 8])))
    before = pool.free_order().tolist()
    pool.clear()
    assert pool.free_order().tolist() == before
    assert (pool.num_cached, pool.num_evictable, pool.num_blank) == (0, 0, 3)
    assert [pool.hash_of(block) for block in range(5)] == [None] * 5
    pool.release(held)
    pool.release(standby)
    assert pool.num_blank == 5
    assert pool.match(chain, 1).tolist() == []


# ---- verified hits


def test_a_colliding_hash_never_gives_another_contents_block() -> None:
    pool = Pool(4, 2, True)
    mine, other = (chain_of(tokens, algorithm=CONSTANT) for tokens in ([1, 2], [7, 8]))
    blocks = filled(pool, mine)
    assert pool.match(mine, 1).tolist() == blocks.tolist()
    assert pool.match(other, 1).tolist() == []


def test_a_block_whose_hash_is_taken_by_other_content_is_neither_registered_nor_standby() -> None:
    pool = Pool(6, 2, True)
    filled(pool, chain_of([1, 2], algorithm=CONSTANT))
    blocks = pool.take(2)
    assert pool.register(blocks, chain_of([7, 8, 1, 2], algorithm=CONSTANT), None) == 0
    assert [pool.state_of(block) for block in blocks.tolist()] == [PLAIN, PLAIN]
    assert pool.num_cached == 1


def test_a_collision_in_the_parent_link_alone_is_a_miss() -> None:
    """Same tokens and keys, other prefix: only the parent link tells the two apart."""

    def no_parent(data: bytes) -> bytes:
        return data[-4:].rjust(32, b"\x00")

    algorithm = HashAlgorithm("no parent", 32, no_parent, True, False)
    pool = Pool(8, 2, True)
    filled(pool, chain_of([1, 1, 5, 5], algorithm=algorithm))
    other = chain_of([2, 2, 5, 5], algorithm=algorithm)
    blocks = pool.take(2)
    assert pool.register(blocks, other, None) == 1
    assert pool.match(other, 2).tolist() == blocks[:1].tolist()


def test_a_collision_in_the_extra_keys_alone_is_a_miss() -> None:
    pool = Pool(4, 2, True)
    plain = chain_of([1, 2], algorithm=CONSTANT)
    salted = chain_of([1, 2], ExtraKeys(cache_salt="s"), CONSTANT)
    filled(pool, salted)
    assert pool.match(plain, 1).tolist() == []
    assert pool.match(salted, 1).tolist() == [0]


def test_extra_keys_of_a_blocks_former_content_are_forgotten() -> None:
    pool = Pool(1, 2, True)
    pool.release(filled(pool, chain_of([1, 2], ExtraKeys(cache_salt="s"), CONSTANT)))
    plain = chain_of([1, 2], algorithm=CONSTANT)
    filled(pool, plain)
    assert pool.match(plain, 1).tolist() == [0]


def test_children_are_found_through_a_standby_that_took_over() -> None:
    """The parent link names the content, not the block, so it survives a promotion."""
    pool = Pool(4, 2, True)
    chain = chain_of([1, 2, 3, 4])
    head = Chain(chain.hashes[:1], chain.token_ids[:2], None)
    tail = Chain(chain.hashes[1:], chain.token_ids[2:], None)
    first = pool.take(1)
    pool.register(first, head, None)
    mine = pool.take(2)
    pool.register(mine[:1], head, None)
    pool.register(mine[1:], tail, int(mine[0]))
    pool.release(first)
    pool.take(2)
    assert pool.block_of(chain.hashes[0]) == mine[0]
    assert pool.match(chain, 2).tolist() == mine.tolist()


# ---- size


@pytest.mark.parametrize("verify_hits", [False, True])
def test_a_pool_of_a_million_blocks_is_a_few_arrays(verify_hits: bool) -> None:
    num_blocks = 1_000_000
    tracemalloc.start()
    pool = Pool(num_blocks, 16, verify_hits)
    size, _ = tracemalloc.get_traced_memory()
    num_allocations = sum(
        trace.count for trace in tracemalloc.take_snapshot().statistics("filename")
    )
    tracemalloc.stop()
    assert pool.num_free == num_blocks
    assert num_allocations < 100
    assert size / num_blocks < BYTES_NEW[FORM] + 85 * verify_hits


@pytest.mark.parametrize("num_blocks", [1 << 16, (1 << 16) + 1])
def test_a_full_pool_stays_within_its_bytes_a_block(num_blocks: int) -> None:
    """One block more than a power of two makes the largest index for its blocks."""
    tokens = np.arange(num_blocks * 16, dtype=np.uint32)
    hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], SEED, 16)
    tracemalloc.start()
    pool = Pool(num_blocks, 16, False)
    blocks = pool.take(num_blocks)
    pool.register(blocks, hasher.chain(None, tokens, NO_EXTRA_KEYS), None)
    pool.release(blocks)
    del blocks
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_evictable == num_blocks
    assert size / num_blocks <= BYTES_FULL[FORM]
