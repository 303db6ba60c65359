"""What compiled modules may use of the pool."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from prefixcache.core.native.free_queue cimport FreeQueue

cdef extern from "hash_index.h" nogil:
    enum:
        INDEX_MIN_DIGEST_BYTES
    ctypedef struct hash_index:
        uint64_t *slots
        uint8_t *digests
        size_t digest_bytes
        int num_bits
        uint64_t factors[2]
        int64_t count
    uint32_t index_key(const hash_index *index, const uint8_t *digest)
    uint8_t *index_digest(const hash_index *index, int32_t block)
    uint64_t index_slot(const hash_index *index, uint32_t key, const uint8_t *digest)
    int32_t index_block_at(const hash_index *index, uint64_t at)
    int32_t index_find(const hash_index *index, const uint8_t *digest)
    void index_set(hash_index *index, uint64_t at, uint32_t key, int32_t block)
    void index_prefetch(const hash_index *index, const uint8_t *digest, int64_t num_left)
    void index_prefetch_slot(const hash_index *index, const uint8_t *digest)
    void __builtin_prefetch(const void *address)
    int64_t index_match(
        const hash_index *index, const uint8_t *digests, int64_t count, int32_t *blocks
    )
    void index_remove(hash_index *index, int32_t block)

cdef extern from "standbys.h" nogil:
    ctypedef struct standby_rings:
        int32_t *after
        int32_t *before
    void ring_add(standby_rings *rings, int32_t registered, int32_t standby)
    void ring_remove(standby_rings *rings, int32_t block)

cdef extern from "contents.h" nogil:
    ctypedef struct contents:
        uint32_t *token_ids
        int64_t *entry
        int64_t *parent
        uint8_t *has_keys
        int64_t last_entry
        size_t block_size
    int64_t contents_match(
        const contents *all, const int32_t *blocks, int64_t count, const uint32_t *token_ids
    )
    void contents_write(
        contents *all, const int32_t *blocks, int64_t count, const uint32_t *token_ids
    )
    void contents_enter(contents *all, int32_t block, int32_t parent)
    bint contents_same(const contents *all, int32_t block, int32_t holder, int32_t parent)
    void contents_share(contents *all, int32_t block, int32_t holder)

cdef enum:
    PLAIN = 0
    REGISTERED = 1
    STANDBY = 2

cdef class Pool:
    cdef readonly Py_ssize_t num_blocks, block_size, digest_bytes
    cdef readonly object ref_cnt
    cdef readonly int64_t num_evictions
    cdef readonly int64_t num_evictable
    cdef FreeQueue _queue
    cdef list _columns
    cdef int32_t *_refs
    cdef uint8_t *_state
    cdef hash_index _index
    cdef standby_rings _rings
    cdef bint _verifies
    cdef contents _contents
    cdef dict _extra_keys

    cdef void *_zeros(self, Py_ssize_t count, object dtype) except NULL
    cdef void *_address(self, object column) except NULL
    cdef void take_into(self, int32_t *blocks, Py_ssize_t count)
    cdef int _check(self, int32_t block_id) except -1
    cdef int _check_all(self, const int32_t[::1] block_ids) except -1
    cdef bytes _digests(self, hashes)
    cdef int _register(self, int32_t block, const uint8_t *digest, int32_t parent) except -1
    cdef void _prefetch_evictions(self, const int32_t *blocks, Py_ssize_t num_left)
    cdef void _evict(self, int32_t block)
    cdef int64_t _num_equal(self, const int32_t *blocks, int64_t count, chain) except -1
    cdef int _write(self, const int32_t[::1] block_ids, chain) except -1
    cdef bint _shares(self, int32_t block, int32_t holder, int32_t parent) except -1
