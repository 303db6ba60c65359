# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The blocks of a prompt that there is room for, in one step.

`prefixcache.core.admission` says what a prompt takes; this does the same for a pool without
accounts that has room for it. Any other is left to it.
"""

from cpython cimport array
from cpython.bytes cimport PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint32_t

from prefixcache.core.native.free_queue cimport queue_remove
from prefixcache.core.native.pool cimport Pool, ages_hit

from array import array as _array

cdef array.array _TABLE = _array("i")


def take_prompt(Pool pool, chain, Py_ssize_t num_usable, Py_ssize_t num_blocks):
    """A table of `num_blocks` blocks, referenced once more each, and how many of them are hits.

    chain: of the prompt, None to take no hits. num_usable: leading blocks of it, at most
    `num_blocks`, that may be hits. None, and nothing is changed, for what is not as plain.
    """
    if pool.keeps_accounts or num_blocks > pool.num_blocks:
        return None
    cdef array.array table = array.clone(_TABLE, num_blocks, zero=False)
    cdef int32_t *blocks = <int32_t *>table.data.as_ints
    cdef int64_t num_hits = 0, num_reused = 0, index
    cdef uint32_t now
    cdef bytes digests = None
    if chain is not None:
        digests = pool._digests(chain.hashes)
        num_usable = min(num_usable, PyBytes_GET_SIZE(digests) // pool.digest_bytes, num_blocks)
        if num_usable > 0 and pool._index.count:
            num_hits = pool._match(chain, digests, num_usable, blocks)
    for index in range(num_hits):
        num_reused += pool._refs[blocks[index]] == 0
    if num_blocks - num_hits + num_reused > pool.num_free:
        return None

    if chain is not None:
        now = pool._now()
        for index in range(num_hits):
            if pool._refs[blocks[index]] == 0:
                queue_remove(&pool._queue.queue, blocks[index])
            pool._refs[blocks[index]] += 1
            ages_hit(&pool._ages, blocks[index], now)
        pool.num_evictable -= num_reused
        pool.num_free -= num_reused
        if pool.num_evictions:
            pool._miss(digests, num_hits, now)
    pool.take_into(&blocks[num_hits], num_blocks - num_hits, 0)
    return table, num_hits
