"""What compiled modules may use of the pool."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from prefixcache.core.native.free_queue cimport FreeQueue, free_queue

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
    int64_t index_confirm(
        const hash_index *index,
        const uint8_t *states,
        uint8_t registered,
        const uint8_t *digests,
        int64_t count,
        const int32_t *blocks,
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
    int64_t contents_entry(const contents *all, int32_t block)
    uint32_t *contents_row(const contents *all, int32_t block)
    void contents_enter(contents *all, int32_t block, int32_t parent)
    bint contents_same(const contents *all, int32_t block, int32_t holder, int32_t parent)
    void contents_share(contents *all, int32_t block, int32_t holder)

cdef extern from "accounts.h" nogil:
    enum:
        MAX_ACCOUNTS
    ctypedef struct account:
        int32_t group
        int64_t guaranteed
        int64_t max_blocks
        int64_t charged
        int64_t shared
        int64_t joined
        int64_t evictable
        int64_t evictions
    ctypedef struct account_group:
        free_queue *queue
        free_queue own
    ctypedef struct block_sharer:
        pass
    ctypedef struct account_book:
        account *all
        account_group *groups
        int32_t count
        int32_t num_groups
        uint16_t *charge
        int64_t *mark
        block_sharer *sharers
        int64_t num_sharers
        int64_t capacity
        int64_t num_unused
        int64_t num_blocks
        int64_t reserved
        int64_t guaranteed
    ctypedef struct hit_counts:
        int64_t num_free
        int64_t num_new
        int64_t num_reserved
        int64_t num_takeable
    free_queue *book_queue(const account_book *book, int32_t block)
    int64_t book_held(const account_book *book, int32_t number)
    int64_t book_limit(const account_book *book, int32_t number)
    int64_t book_findable(const account_book *book, int32_t number, int64_t num_blank)
    int64_t book_available(
        const account_book *book, int32_t number, int64_t num_blank, int64_t more
    )
    hit_counts book_count_hits(
        const account_book *book,
        int32_t number,
        const int32_t *refs,
        const int32_t *blocks,
        int64_t count,
    )
    void change_charged(account_book *book, int32_t number, int64_t charged, int64_t shared)
    void change_evictable(account_book *book, int32_t number, int64_t change)
    void book_guarantee(account_book *book, int32_t number, int64_t guaranteed)
    void book_charge(account_book *book, int32_t block, int32_t number)
    void book_share(account_book *book, int32_t block, int32_t number)
    void book_leave(account_book *book, int32_t block, int32_t number, int32_t refs)
    void book_free(account_book *book, int32_t block, bint is_evictable)
    void book_use(account_book *book, int32_t block)
    void book_pop(
        account_book *book, int32_t number, int64_t num_blank, int64_t count, int32_t *blocks
    )

cdef extern from "block_ages.h" nogil:
    enum:
        AGES_MAX_BOUNDS
        GHOST_WAYS
        MAX_GHOST_GAP
    ctypedef struct block_times:
        pass
    ctypedef struct age_counts:
        int64_t *counts
        int64_t sum
    ctypedef struct block_ages:
        block_times *times
        uint64_t *ghosts
        uint64_t num_sets
        uint32_t *bounds
        age_counts lifetime, idle, reuse_gap, evict_to_reuse
    void age_add(const block_ages *ages, age_counts *counts, uint32_t age)
    void ghost_prefetch(const block_ages *ages, const uint8_t *digest)
    int64_t ghost_age(const block_ages *ages, const uint8_t *digest, uint32_t now)
    bint ghost_set_has_room(const block_ages *ages, const uint8_t *digest)
    void ages_register(block_ages *ages, int32_t block, uint32_t now)
    void ages_take_over(block_ages *ages, int32_t heir, int32_t block)
    void ages_use(block_ages *ages, int32_t block, uint32_t now)
    void ages_hit(block_ages *ages, int32_t block, uint32_t now)
    void ages_evict(block_ages *ages, int32_t block, const uint8_t *digest, uint32_t now)

cdef enum:
    PLAIN = 0
    REGISTERED = 1
    STANDBY = 2

cdef class Pool:
    cdef readonly Py_ssize_t num_blocks, block_size, digest_bytes
    cdef readonly object ref_cnt
    cdef readonly int64_t num_evictions
    cdef readonly int64_t num_evictable
    cdef readonly int64_t num_free
    cdef readonly int64_t num_quarantined
    cdef readonly bint keeps_accounts
    cdef account_book _book
    cdef object _sharers
    cdef FreeQueue _queue
    cdef list _columns
    cdef int32_t *_refs
    cdef uint8_t *_state
    cdef hash_index _index
    cdef standby_rings _rings
    cdef bint _verifies
    cdef bint _has_nodes
    cdef contents _contents
    cdef dict _extra_keys
    cdef block_ages _ages
    cdef object _dropped
    cdef uint32_t _dropped_at
    cdef object _clock
    cdef double _made_at_s
    cdef readonly object events
    cdef uint8_t *_removed

    cdef void *_zeros(self, Py_ssize_t count, object dtype) except NULL
    cdef void *_address(self, object column) except NULL
    cdef int take_into(self, int32_t *blocks, Py_ssize_t count, int32_t account) except -1

    cdef inline int64_t _num_available(self, int32_t account, int64_t num_reserved) noexcept:
        if not self.keeps_accounts:
            return self.num_free
        cdef int64_t num_blank = self.num_free - self.num_evictable
        return book_available(&self._book, account, num_blank, num_reserved)

    cdef int64_t _num_findable(self, int32_t account)
    cdef bint _may_hold(self, int32_t account, int64_t num_blocks, int64_t num_added)
    cdef int _keep_accounts(self) except -1
    cdef int _make_sharers(self, int64_t count) except -1
    cdef int _check_account(self, int32_t account) except -1
    cdef int _make_ages(self) except -1
    cdef int _remember_dropped(self) except -1
    cdef uint32_t _now(self) except? 0
    cdef int _miss(self, bytes digests, Py_ssize_t num_hits, uint32_t now) except -1
    cdef int _check(self, int32_t block_id) except -1
    cdef int _check_all(self, const int32_t[::1] block_ids) except -1
    cdef bytes _digests(self, hashes)
    cdef int64_t _match(self, chain, bytes digests, int64_t count, int32_t *blocks) except -1
    cdef int _register(
        self, int32_t block, const uint8_t *digest, int32_t parent, uint32_t now
    ) except -1
    cdef void _prefetch_evictions(self, const int32_t *blocks, Py_ssize_t num_left)
    cdef bint _evict(self, int32_t block, uint32_t now)
    cdef int _tell_removed(self, Py_ssize_t count) except -1
    cdef int _tell_stored(
        self, bytes digests, chain, Py_ssize_t start, Py_ssize_t end, int32_t parent
    ) except -1
    cdef int64_t _num_equal(self, const int32_t *blocks, int64_t count, chain) except -1
    cdef int _write(self, const int32_t[::1] block_ids, chain) except -1
    cdef bint _has_same(self, int32_t block, int32_t holder, int32_t parent) except -1
