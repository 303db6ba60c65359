# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""A sequence with the blocks of its prompt that there is room for, in one step.

`prefixcache.core.admission` says what a prompt takes; this does the same for a pool without
accounts that has room for it. Any other is left to it.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from prefixcache.core.native.free_queue cimport queue_remove
from prefixcache.core.native.pool cimport Pool, ages_hit
from prefixcache.core.native.sequence_record cimport SequenceRecord

from array import array as _array

from prefixcache.types import FullHit

cdef array.array _TABLE = _array("i")
cdef array.array _TOKENS = _array("I")
cdef object _LAST_BLOCK = FullHit.LAST_BLOCK


def begin_sequence(Pool pool, kind, prompt, terms):
    """The sequence, with one more reference on each block of its table.

    kind: `Sequence`. None, and nothing is changed, for what is not as plain.
    """
    token_ids, extra_keys, chain = prompt
    (
        owner,
        request_id,
        num_lookahead_tokens,
        cache_use,
        full_hit,
        account,
        registers,
        num_layers,
        now_s,
    ) = terms
    cdef Py_ssize_t size = pool.block_size, num_tokens = len(token_ids)
    cdef Py_ssize_t num_blocks = (num_tokens + num_lookahead_tokens + size - 1) // size
    cdef Py_ssize_t num_usable = (num_tokens - (full_hit is _LAST_BLOCK)) // size
    if pool.keeps_accounts or num_blocks > pool.num_blocks:
        return None
    # All that may fail goes ahead of what changes the pool.
    cdef SequenceRecord sequence = kind.__new__(kind)
    cdef bytes hashes = chain.hashes.data if registers and chain is not None else b""
    cdef array.array table = array.clone(_TABLE, num_blocks, zero=False)
    sequence.owner, sequence.request_id = owner, request_id
    sequence.cache_use, sequence.extra_keys = cache_use, extra_keys
    sequence.token_ids, sequence.block_table = _tokens(token_ids, num_tokens), table
    sequence.hashes = PyByteArray_FromStringAndSize(
        PyBytes_AS_STRING(hashes), PyBytes_GET_SIZE(hashes)
    )
    chain = chain if cache_use.reads else None
    cdef int32_t *blocks = <int32_t *>table.data.as_ints
    cdef Py_ssize_t num_hits = _take(pool, chain, num_usable, num_blocks, blocks)
    if num_hits < 0:
        return None

    sequence.num_prompt_tokens = num_tokens
    sequence.num_cached_tokens = min(num_hits * size, num_tokens - 1)
    sequence.num_cached_blocks = num_hits
    sequence.first_writable = num_hits * size
    sequence.computed = [sequence.num_cached_tokens] * <Py_ssize_t>num_layers
    sequence.registers = registers
    sequence.created_at_s = now_s
    sequence.account = account
    sequence.num_lookahead_tokens = num_lookahead_tokens
    return sequence


cdef array.array _tokens(token_ids, Py_ssize_t count):
    """A copy of `[count] uint32`."""
    cdef Py_buffer source
    cdef array.array tokens = array.clone(_TOKENS, count, zero=False)
    PyObject_GetBuffer(token_ids, &source, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    try:
        if source.len != count * <Py_ssize_t>sizeof(uint32_t):
            raise ValueError(f"{source.len} bytes for {count} tokens")
        memcpy(tokens.data.as_uints, source.buf, source.len)
    finally:
        PyBuffer_Release(&source)
    return tokens


cdef Py_ssize_t _take(
    Pool pool, chain, Py_ssize_t num_usable, Py_ssize_t num_blocks, int32_t *blocks
) except -2:
    """Take `num_blocks` blocks; how many of them are hits. -1, and nothing is changed, for no room.

    chain: of the prompt, None to take no hits. num_usable: leading blocks of it that may be hits.
    """
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
        return -1

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
    return num_hits
