"""The block manager of a daemon, made as the daemon makes it, without one."""

from __future__ import annotations

from prefixcache.core.hashing import HASH_ALGORITHMS, Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.sequences import Sequences


def make_block_manager(num_blocks: int, block_size: int, algorithm: str) -> Sequences:
    """With an empty pool; hits are verified where a daemon's are by default."""
    recipe = HASH_ALGORITHMS[algorithm]
    pool = Pool(num_blocks, block_size, not recipe.is_cryptographic, recipe.digest_bytes)
    return Sequences(pool, Hasher(recipe, None, block_size))
