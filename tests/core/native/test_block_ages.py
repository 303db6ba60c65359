"""Both forms of the pool observe the same ages, to the last bucket and ghost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from prefixcache.core.native.pool import Pool as NativePool

from prefixcache.core.hashing import HASH_ALGORITHMS, Chain, Hasher
from prefixcache.core.python.pool import Pool as PythonPool
from prefixcache.types import NO_EXTRA_KEYS

SIZE = 2


@pytest.mark.parametrize("seed", range(4))
def test_the_forms_agree_after_a_random_run(seed: int) -> None:
    rng = random.Random(seed)
    now_s = 5.0
    pools = [make(60, SIZE, False, clock=lambda: now_s) for make in (NativePool, PythonPool)]
    hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], "a seed of the tests", SIZE)
    chains = [
        hasher.chain(None, np.arange(n * 100, n * 100 + SIZE * m, dtype=np.uint32), NO_EXTRA_KEYS)
        for n, m in enumerate(rng.choices(range(1, 12), k=40))
    ]
    held: list[np.ndarray] = []
    for _ in range(1500):
        now_s += rng.choice([0, 0.01, 0.3, 7, 200, 90000])
        if rng.random() < 0.01:
            for pool in pools:
                pool.clear()
        chain = chains[min(rng.randrange(40), rng.randrange(40))]
        while len(chain.hashes) > pools[0].num_free:
            blocks = held.pop(rng.randrange(len(held)))
            for pool in pools:
                pool.release(blocks)
        held.append(both(pools, chain))
    ages = [pool.ages() for pool in pools]
    assert ages[0] == ages[1]
    assert min(ages[0].lifetime.count, ages[0].reuse_gap.count, ages[0].evict_to_reuse.count) > 100


def both(pools: list, chain: Chain) -> np.ndarray:
    """Serve a prompt with each; its blocks, which are the same."""
    tables = []
    for pool in pools:
        hits = pool.match(chain, len(chain.hashes))
        pool.acquire_hits(hits, chain)
        new = pool.take(len(chain.hashes) - len(hits))
        rest = Chain(chain.hashes[len(hits) :], chain.token_ids[len(hits) * SIZE :], None)
        pool.register(new, rest, int(hits[-1]) if len(hits) else None)
        tables.append(np.concatenate((hits, new)))
    assert tables[0].tolist() == tables[1].tolist()
    return tables[0]
