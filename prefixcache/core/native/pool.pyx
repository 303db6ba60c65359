# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The block pool over flat columns; `prefixcache.core.pool` says what a pool is.

Every block is a row in a few columns of numpy arrays: 82 to 98 bytes a block with digests of 32
bytes, and 10 more once accounts are kept. The index, the free queue, the rings of standbys, the
contents, the ages and the accounts are C structs over those columns, each in a header of its name.
"""

import os
import time

import numpy as np

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport UINT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from prefixcache.core.native.free_queue cimport (
    FreeQueue,
    free_queue,
    queue_insert,
    queue_peek,
    queue_pop,
    queue_push_tail,
    queue_remove,
    queue_splice,
)

from prefixcache.core.accounts import AccountUse, HitCounts

cdef int64_t _NO_LIMIT = INT64_MAX

from prefixcache.core.block_ages import BOUNDS_TICKS, TICKS_PER_S, BlockAges, BlockPast, histogram
from prefixcache.core.block_ages import num_ghost_sets

cdef enum:
    EVICTION_COLUMNS_AHEAD = 16
    EVICTION_SLOTS_AHEAD = 8
    GHOSTS_AHEAD = 8
    REMOVED_AT_ONCE = 4096

cdef double _TICKS_PER_S = TICKS_PER_S
cdef size_t _SET_BYTES = GHOST_WAYS * sizeof(uint64_t)


cdef class Pool:
    """`num_blocks` blocks, all blank at first, taken in the order of their ids."""

    def __init__(
        self,
        Py_ssize_t num_blocks,
        Py_ssize_t block_size,
        bint verify_hits,
        Py_ssize_t digest_bytes=32,
        events=None,
        *,
        clock=time.monotonic,
    ):
        if num_blocks < 1 or num_blocks >= 1 << 31 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens")
        if digest_bytes < INDEX_MIN_DIGEST_BYTES:
            raise ValueError(f"digest_bytes is {digest_bytes}, must be {INDEX_MIN_DIGEST_BYTES}+")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.digest_bytes = digest_bytes
        self._queue = FreeQueue(num_blocks, MAX_ACCOUNTS)
        self.num_free = num_blocks
        self._columns = []
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)
        self._refs = <int32_t *>self._address(self.ref_cnt)
        self._state = <uint8_t *>self._zeros(num_blocks, np.uint8)
        self._rings.after = <int32_t *>self._zeros(num_blocks, np.int32)
        self._rings.before = <int32_t *>self._zeros(num_blocks, np.int32)
        self._index.num_bits = (2 * num_blocks - 1).bit_length()
        self._index.slots = <uint64_t *>self._zeros(1 << self._index.num_bits, np.uint64)
        self._index.digests = <uint8_t *>self._zeros(num_blocks * digest_bytes, np.uint8)
        self._index.digest_bytes = digest_bytes
        self._index.factors[0] = int.from_bytes(os.urandom(8), "little") | 1
        self._index.factors[1] = int.from_bytes(os.urandom(8), "little") | 1
        self.events = events
        if events is not None:
            self._removed = <uint8_t *>self._zeros(REMOVED_AT_ONCE * digest_bytes, np.uint8)
        self._verifies = verify_hits
        self._has_nodes = verify_hits or events is not None
        if self._has_nodes:
            self._contents.entry = <int64_t *>self._zeros(num_blocks, np.int64)
            self._contents.parent = <int64_t *>self._zeros(num_blocks, np.int64)
        if verify_hits:
            self._contents.block_size = block_size
            self._contents.token_ids = <uint32_t *>self._zeros(num_blocks * block_size, np.uint32)
            self._contents.has_keys = <uint8_t *>self._zeros(num_blocks, np.uint8)
            self._extra_keys = {}
        self._clock = clock
        self._made_at_s = clock()
        self._make_ages()

    cdef int _make_ages(self) except -1:
        cdef Py_ssize_t index, num_sets = num_ghost_sets(self.num_blocks)
        assert len(BOUNDS_TICKS) <= AGES_MAX_BOUNDS
        for index in range(len(BOUNDS_TICKS)):
            self._ages.bounds[index] = BOUNDS_TICKS[index]
        self._ages.bounds[len(BOUNDS_TICKS)] = UINT32_MAX
        self._ages.times = <block_times *>self._zeros(self.num_blocks, np.uint64)
        self._ages.num_sets = num_sets
        # One set more than there are: each begins where a line of the cache does.
        cdef size_t start = <size_t>self._zeros((num_sets + 1) * GHOST_WAYS, np.uint64)
        self._ages.ghosts = <uint64_t *>((start + _SET_BYTES - 1) // _SET_BYTES * _SET_BYTES)
        self._dropped = np.zeros(0, dtype=np.uint64)
        return 0

    cdef void *_zeros(self, Py_ssize_t count, object dtype) except NULL:
        return self._address(np.zeros(count, dtype=dtype))

    cdef void *_address(self, object column) except NULL:
        """Keep an array and say where its elements are."""
        self._columns.append(column)
        cdef const uint8_t[::1] view = column.view(np.uint8)
        return <void *>&view[0]

    # ---- what it holds

    @property
    def num_blank(self):
        return self.num_free - self.num_evictable

    @property
    def num_referenced(self):
        """Those in quarantine are not among them, though they have a ref count of 1."""
        return self.num_blocks - self.num_free - self.num_quarantined

    @property
    def num_cached(self):
        return self._index.count

    def state_of(self, int32_t block_id):
        """PLAIN, REGISTERED or STANDBY."""
        self._check(block_id)
        return self._state[block_id]

    def hash_of(self, int32_t block_id):
        self._check(block_id)
        if self._state[block_id] == PLAIN:
            return None
        return PyBytes_FromStringAndSize(
            <char *>index_digest(&self._index, block_id), self.digest_bytes
        )

    def block_of(self, bytes block_hash):
        """The block registered under a hash; its content is not compared."""
        if len(block_hash) != self.digest_bytes:
            raise ValueError(f"a hash of {len(block_hash)} bytes, not {self.digest_bytes}")
        cdef int32_t block = index_find(
            &self._index, <const uint8_t *>PyBytes_AS_STRING(block_hash)
        )
        return None if block < 0 else block

    def free_order(self):
        """Free blocks from the next one to be taken to the last one, `[num_free] int32`.

        With accounts: the blank ones and those of group 0, then those of each other group.
        """
        if not self.keeps_accounts:
            return self._queue.order()
        order = np.empty(self.num_free, dtype=np.int32)
        cdef int32_t[::1] blocks = order
        cdef Py_ssize_t done = 0
        cdef int32_t group
        for group in range(self._book.num_groups):
            if self._book.groups[group].queue.length:
                queue_peek(
                    self._book.groups[group].queue,
                    self._book.groups[group].queue.length,
                    &blocks[done],
                )
                done += self._book.groups[group].queue.length
        return order

    @property
    def keeps_content(self):
        """Whether `children_of`, `tokens_of` and `keys_of` may be asked: hits are verified."""
        return self._verifies

    def children_of(self, parent, Py_ssize_t limit):
        """Registered blocks that follow a cached one, `[at most limit] int32`, by their ids.

        parent: None for those that begin a sequence. Looks at all blocks.
        """
        assert self._verifies
        cdef int32_t before = -1 if parent is None else parent, block
        if before >= 0:
            self._check(before)
        cdef int64_t entry = contents_entry(&self._contents, before)
        cdef list found = []
        for block in range(self.num_blocks):
            if len(found) == limit:
                break
            if self._contents.parent[block] == entry and self._state[block] == REGISTERED:
                found.append(block)
        return np.array(found, dtype=np.int32)

    def tokens_of(self, const int32_t[::1] block_ids):
        """Of registered blocks, `[n, B]`: a copy."""
        assert self._verifies
        self._check_all(block_ids)
        cdef Py_ssize_t index, count = block_ids.shape[0], size = self.block_size
        token_ids = np.empty((count, size), dtype=np.uint32)
        cdef uint32_t[:, ::1] rows = token_ids
        for index in range(count):
            memcpy(&rows[index, 0], contents_row(&self._contents, block_ids[index]), 4 * size)
        return token_ids

    def keys_of(self, int32_t block_id):
        """The encoded extra keys of a registered block, `b""` for none."""
        assert self._verifies
        self._check(block_id)
        return self._extra_keys[block_id] if self._contents.has_keys[block_id] else b""

    def past_of(self, bytes block_hash):
        """What is remembered of a hash that is not cached."""
        if len(block_hash) != self.digest_bytes:
            raise ValueError(f"a hash of {len(block_hash)} bytes, not {self.digest_bytes}")
        cdef const uint8_t *digest = <const uint8_t *>PyBytes_AS_STRING(block_hash)
        cdef uint32_t now = self._now()
        cdef int64_t age = ghost_age(&self._ages, digest, now)
        was_dropped = (self._dropped == np.frombuffer(block_hash[:8], dtype=np.uint64)).any()
        return BlockPast(
            None if age < 0 else <uint32_t>age / _TICKS_PER_S,
            <uint32_t>(now - self._dropped_at) / _TICKS_PER_S if was_dropped else None,
            ghost_set_has_room(&self._ages, digest),
        )

    def is_private(self, int32_t block_id):
        """True if one holder has it and nobody can find it: its slots may be written."""
        self._check(block_id)
        return self._refs[block_id] == 1 and self._state[block_id] == PLAIN

    # ---- calls

    def match(self, chain, Py_ssize_t limit):
        """Blocks of the longest cached prefix of the chain, at most `limit`. Changes nothing."""
        cdef bytes digests = self._digests(chain.hashes)
        cdef Py_ssize_t count = min(limit, len(digests) // self.digest_bytes)
        block_ids = np.empty(max(count, 0), dtype=np.int32)
        if count <= 0 or not self._index.count:
            return block_ids[:0]
        cdef int32_t[::1] found = block_ids
        return block_ids[: self._match(chain, digests, count, &found[0])]

    cdef int64_t _match(self, chain, bytes digests, int64_t count, int32_t *blocks) except -1:
        """`match`, of the first `count` digests."""
        cdef const uint8_t *digest = <const uint8_t *>PyBytes_AS_STRING(digests)
        cdef const int32_t[::1] guess
        cdef int64_t num_found = 0
        if chain.guess is not None:
            guess = chain.guess
            num_found = min(count, guess.shape[0])
            if num_found:
                num_found = index_confirm(
                    &self._index, self._state, REGISTERED, digest, num_found, &guess[0]
                )
                memcpy(blocks, &guess[0], num_found * sizeof(int32_t))
        num_found += index_match(
            &self._index,
            digest + num_found * self.digest_bytes,
            count - num_found,
            blocks + num_found,
        )
        return self._num_equal(blocks, num_found, chain) if self._verifies and num_found else num_found

    def guess(self, hashes):
        """What `match` may find: the blocks of the longest run of these hashes, without the lock.

        Others may change the pool meanwhile, and run. `match` looks at each block of it again, at
        a fraction of the cost.
        """
        cdef bytes digests = self._digests(hashes)
        cdef const uint8_t *digest = <const uint8_t *>PyBytes_AS_STRING(digests)
        cdef int64_t count = len(hashes), num_found = 0
        block_ids = np.empty(count, dtype=np.int32)
        cdef int32_t[::1] found = block_ids
        if count:
            with nogil:
                num_found = index_match(&self._index, digest, count, &found[0])
        return block_ids[:num_found]

    def acquire(self, const int32_t[::1] block_ids, int32_t account=0):
        """One more reference of an account on each of distinct, cached or referenced blocks."""
        cdef free_queue *queue = &self._queue.queue
        cdef bint keeps_accounts = self.keeps_accounts
        cdef int64_t num_reused = 0
        cdef Py_ssize_t index
        cdef int32_t block
        self._check_all(block_ids)
        self._check_account(account)
        if keeps_accounts:
            self._make_sharers(block_ids.shape[0])
        for index in range(block_ids.shape[0]):
            block = block_ids[index]
            if self._refs[block] == 0:
                num_reused += 1
                if keeps_accounts:
                    queue = book_queue(&self._book, block)
                    change_evictable(&self._book, self._book.charge[block], -1)
                    book_charge(&self._book, block, account)
                queue_remove(queue, block)
            elif keeps_accounts:
                book_share(&self._book, block, account)
            self._refs[block] += 1
        self.num_evictable -= num_reused
        self.num_free -= num_reused

    def acquire_hits(self, const int32_t[::1] block_ids, chain, int32_t account=0):
        """`acquire` for the cached start of a chain that an Allocate asks for.

        That uses those blocks; of the rest of the chain, those that were evicted are observed.
        """
        cdef uint32_t now = self._now()
        cdef Py_ssize_t index
        self.acquire(block_ids, account)
        for index in range(block_ids.shape[0]):
            ages_hit(&self._ages, block_ids[index], now)
        if self.num_evictions:
            self._miss(self._digests(chain.hashes), block_ids.shape[0], now)

    def take(self, Py_ssize_t count, int32_t account=0):
        """`count` plain blocks with one reference of an account each, in the order of eviction.

        Cached ones among them are evicted. The caller has checked `num_available`.
        """
        self._check_account(account)
        assert 0 <= count <= self._num_findable(account)
        taken = np.empty(count, dtype=np.int32)
        if count == 0:
            return taken
        cdef int32_t[::1] blocks = taken
        self.take_into(&blocks[0], count, account)
        return taken

    cdef int take_into(self, int32_t *blocks, Py_ssize_t count, int32_t account) except -1:
        cdef bint keeps_accounts = self.keeps_accounts
        cdef Py_ssize_t index
        cdef int32_t block
        cdef uint32_t now = self._now() if self.num_evictable else 0
        cdef Py_ssize_t num_removed = 0
        if keeps_accounts:
            book_pop(&self._book, account, self.num_free - self.num_evictable, count, blocks)
        else:
            queue_pop(&self._queue.queue, count, blocks)
        self.num_free -= count
        for index in range(count):
            self._prefetch_evictions(&blocks[index], count - index)
            block = blocks[index]
            self._refs[block] = 1
            if self._state[block] == REGISTERED:
                self.num_evictable -= 1
                self._state[block] = PLAIN
                if self._evict(block, now) and self._removed != NULL:
                    memcpy(
                        self._removed + num_removed * self.digest_bytes,
                        index_digest(&self._index, block),
                        self.digest_bytes,
                    )
                    num_removed += 1
                    if num_removed == REMOVED_AT_ONCE:
                        self._tell_removed(num_removed)
                        num_removed = 0
            if keeps_accounts:
                self._book.charge[block] = account
                self._book.mark[block] = 0
        if num_removed:
            self._tell_removed(num_removed)
        return 0

    def release(self, const int32_t[::1] block_ids, int32_t account=0):
        """One reference of an account less on each of distinct blocks of a table, last to first.

        Blocks that reach 0 go to the tail of the free queue if registered, and to its head, as one
        group, if not. A standby that reaches 0 becomes blank, and its hash's registered block is
        used at that moment: if that is free, it moves to the tail in the standby's turn.
        """
        cdef free_queue *blank = &self._queue.queue
        cdef free_queue *queue = blank
        cdef bint keeps_accounts = self.keeps_accounts
        cdef int32_t after = blank.ends, block, holder
        cdef int64_t num_freed = 0, num_registered = 0
        cdef Py_ssize_t index
        self._check_all(block_ids)
        cdef uint32_t now = self._now()
        self._check_account(account)
        for index in range(block_ids.shape[0] - 1, -1, -1):
            block = block_ids[index]
            self._refs[block] -= 1
            if self._refs[block]:
                if keeps_accounts and self._book.mark[block]:
                    book_leave(&self._book, block, account, self._refs[block])
                continue
            num_freed += 1
            if keeps_accounts:
                queue = book_queue(&self._book, block)
                book_free(&self._book, block, self._state[block] == REGISTERED)
            if self._state[block] == REGISTERED:
                queue_push_tail(queue, block)
                num_registered += 1
                ages_use(&self._ages, block, now)
                continue
            if self._state[block] == STANDBY:
                self._state[block] = PLAIN
                ring_remove(&self._rings, block)
                holder = index_find(&self._index, index_digest(&self._index, block))
                ages_use(&self._ages, holder, now)
                if self._refs[holder] == 0:
                    if keeps_accounts:
                        queue = book_queue(&self._book, holder)
                        book_use(&self._book, holder)
                    queue_remove(queue, holder)
                    queue_push_tail(queue, holder)
            queue_insert(blank, block, after)
            after = block
        self.num_free += num_freed
        self.num_evictable += num_registered

    def quarantine(self, const int32_t[::1] block_ids, Py_ssize_t start, int32_t account=0):
        """`release`, but for plain blocks from place `start` on that nobody else has.

        Returns those. They keep their reference and are quarantined until `end_quarantine`: neither
        free nor anybody's.
        """
        cdef Py_ssize_t index
        cdef int32_t block
        self._check_all(block_ids)
        stays = np.zeros(block_ids.shape[0], dtype=bool)
        cdef uint8_t[::1] flags = stays.view(np.uint8)
        for index in range(max(0, start), block_ids.shape[0]):
            block = block_ids[index]
            flags[index] = self._refs[block] == 1 and self._state[block] == PLAIN
        columns = np.asarray(block_ids)
        self.release(columns[~stays], account)
        quarantined = columns[stays]
        self.num_quarantined += len(quarantined)
        return quarantined

    def end_quarantine(self, const int32_t[::1] block_ids, int32_t account=0):
        """Quarantined blocks are blank from now on."""
        self.num_quarantined -= block_ids.shape[0]
        self.release(block_ids, account)

    def register(self, const int32_t[::1] block_ids, chain, parent):
        """Make referenced plain blocks, whose K/V are complete, findable by their hashes.

        block_ids: the blocks of `chain`, `[len(chain.hashes)]`. parent: the cached block before
        them, None for the start of a sequence. A block whose hash is taken by the same content
        becomes a standby. Returns how many blocks were registered or stand by: fewer than given
        if a hash is taken by other content, and then nothing from that block on is registered.
        """
        cdef bytes digests = self._digests(chain.hashes)
        cdef Py_ssize_t count = block_ids.shape[0], index, first_new = 0
        cdef int32_t before = -1 if parent is None else parent, run_parent = before
        cdef int done
        if len(digests) != count * self.digest_bytes:
            raise ValueError(f"{len(digests)} bytes of hashes for {count} blocks")
        self._check_all(block_ids)
        cdef uint32_t now = self._now()
        if count and self._verifies:
            self._write(block_ids, chain)
        cdef const uint8_t *digest = <const uint8_t *>PyBytes_AS_STRING(digests)
        for index in range(count):
            index_prefetch(&self._index, digest, count - index)
            done = self._register(block_ids[index], digest, before, now)
            if done != REGISTERED:
                if first_new < index:
                    self._tell_stored(digests, chain, first_new, index, run_parent)
                if not done:
                    return index
                first_new, run_parent = index + 1, block_ids[index]
            before = block_ids[index]
            digest += self.digest_bytes
        if first_new < count:
            self._tell_stored(digests, chain, first_new, count, run_parent)
        return count

    def ages(self):
        """What was observed of blocks' ages since the pool was made."""
        return BlockAges(
            _histogram(&self._ages.lifetime),
            _histogram(&self._ages.idle),
            _histogram(&self._ages.reuse_gap),
            _histogram(&self._ages.evict_to_reuse),
        )

    def clear(self):
        """Drop every hash. Free cached blocks become blank where they are in the queue.

        With accounts: those of each group behind those of the one before.
        """
        cdef int32_t number
        self._remember_dropped()
        if self.keeps_accounts:
            for number in range(1, self._book.num_groups):
                queue_splice(&self._queue.queue, self._book.groups[number].queue)
            for number in range(self._book.count):
                change_evictable(&self._book, number, -self._book.all[number].evictable)
        memset(self._index.slots, 0, sizeof(uint64_t) << self._index.num_bits)
        memset(self._rings.after, 0, sizeof(int32_t) * self.num_blocks)
        memset(self._rings.before, 0, sizeof(int32_t) * self.num_blocks)
        memset(self._state, PLAIN, self.num_blocks)
        memset(self._ages.ghosts, 0, self._ages.num_sets * _SET_BYTES)
        self._index.count = 0
        self.num_evictable = 0
        if self._verifies:
            memset(self._contents.has_keys, 0, self.num_blocks)
            self._extra_keys.clear()
        if self.events is not None:
            self.events.cleared()

    def copy_cached(self, room):
        """Copy the columns of all registered blocks; returns how many. Needs `events`."""
        cdef uint8_t[:, ::1] digests = room.digests
        cdef int64_t[::1] entries = room.entries, parents = room.parents
        cdef Py_ssize_t count = 0, room_size = entries.shape[0]
        cdef int32_t block
        assert self.events is not None and parents.shape[0] == digests.shape[0] == room_size
        assert self._index.count <= room_size and digests.shape[1] == self.digest_bytes
        for block in range(self.num_blocks):
            if self._state[block] == REGISTERED:
                memcpy(&digests[count, 0], index_digest(&self._index, block), self.digest_bytes)
                entries[count] = self._contents.entry[block]
                parents[count] = self._contents.parent[block]
                count += 1
        return count

    # ---- accounts

    @property
    def num_accounts(self):
        return self._book.count if self.keeps_accounts else 1

    def set_account(self, int32_t account, int32_t group, int64_t guaranteed, max_blocks):
        """Keep accounts from now on, and give one its rules. `max_blocks`: None for no limit.

        The next number makes a new account, in a group that there is or the next one; any other
        changes an old one, whose group stays. Raises ValueError for anything else, and for a sum
        of guarantees above the number of blocks.
        """
        cdef int64_t others
        cdef bint is_new = account == self.num_accounts
        if not 0 <= account < MAX_ACCOUNTS or account > self.num_accounts:
            raise ValueError(f"account {account} of {self.num_accounts}, at most {MAX_ACCOUNTS}")
        if self.keeps_accounts and not is_new and group != self._book.all[account].group:
            raise ValueError(f"account {account} is of group {self._book.all[account].group}")
        if not 0 <= group <= (self._book.num_groups if self.keeps_accounts else account):
            raise ValueError(f"group {group} of {self._book.num_groups}")
        others = 0
        if self.keeps_accounts:
            others = self._book.guaranteed
            if not is_new:
                others -= self._book.all[account].guaranteed
        if not 0 <= guaranteed <= self.num_blocks - others:
            raise ValueError(f"{guaranteed} blocks guaranteed, {others} to others")
        if max_blocks is not None and max_blocks < guaranteed:
            raise ValueError(f"{guaranteed} blocks guaranteed, and at most {max_blocks}")
        if not self.keeps_accounts:
            self._keep_accounts()
        if is_new:
            if group == self._book.num_groups:
                self._queue.start(&self._book.groups[group].own, group)
                self._book.groups[group].queue = &self._book.groups[group].own
                self._book.num_groups += 1
            self._book.all[account].group = group
            self._book.count += 1
        self._book.all[account].max_blocks = _NO_LIMIT if max_blocks is None else max_blocks
        book_guarantee(&self._book, account, guaranteed)

    def account(self, int32_t account):
        """An account as it stands."""
        self._check_account(account)
        if not self.keeps_accounts:
            held = self.num_blocks - self.num_free
            return AccountUse(0, 0, None, held, held, self.num_evictable, self.num_evictions)
        one = self._book.all[account]
        return AccountUse(
            one.group,
            one.guaranteed,
            None if one.max_blocks == _NO_LIMIT else one.max_blocks,
            one.charged + one.joined,
            one.charged - one.shared,
            one.evictable,
            one.evictions,
        )

    def num_unreserved(self):
        """Blocks that are neither held nor guaranteed to an account that lacks them.

        Below 0 while borrowed blocks stand against a guarantee that was raised.
        """
        if self.keeps_accounts:
            return self._book.num_blocks - self._book.reserved
        return self.num_free

    def num_available(self, int32_t account=0, int64_t num_reserved=0):
        """Blocks that an account can have now, when `num_reserved` go to what it shares."""
        self._check_account(account)
        return self._num_available(account, num_reserved)

    def num_allowed(self, int32_t account=0):
        """Blocks that an account may hold at most, those guaranteed to others regarded."""
        self._check_account(account)
        return book_limit(&self._book, account) if self.keeps_accounts else self.num_blocks

    def max_blocks(self, int32_t account=0):
        """The limit that was set for an account."""
        self._check_account(account)
        if not self.keeps_accounts or self._book.all[account].max_blocks == _NO_LIMIT:
            return None
        return self._book.all[account].max_blocks

    def num_held(self, int32_t account=0):
        """Blocks that an account references, or has in quarantine."""
        self._check_account(account)
        if self.keeps_accounts:
            return book_held(&self._book, account)
        return self.num_blocks - self.num_free

    def count_hits(self, const int32_t[::1] block_ids, int32_t account=0):
        """What it would take an account to reference distinct cached blocks. Changes nothing."""
        cdef Py_ssize_t index, num_blocks = block_ids.shape[0]
        cdef hit_counts counts
        cdef int64_t num_free = 0
        self._check_all(block_ids)
        self._check_account(account)
        if self.keeps_accounts:
            counts = book_count_hits(
                &self._book, account, self._refs, &block_ids[0] if num_blocks else NULL, num_blocks
            )
            return HitCounts(
                counts.num_free, counts.num_new, counts.num_reserved, counts.num_takeable
            )
        for index in range(num_blocks):
            num_free += self._refs[block_ids[index]] == 0
        return HitCounts(num_free, num_free, 0, num_blocks)

    cdef int64_t _num_findable(self, int32_t account):
        if not self.keeps_accounts:
            return self.num_free
        return book_findable(&self._book, account, self.num_free - self.num_evictable)

    cdef bint _may_hold(self, int32_t account, int64_t num_blocks, int64_t num_added):
        """`prefixcache.core.quota`, of a sequence of `num_blocks` blocks."""
        if not self.keeps_accounts:
            return True
        if num_blocks > book_limit(&self._book, account):
            return False
        return book_held(&self._book, account) + num_added <= self._book.all[account].max_blocks

    cdef int _keep_accounts(self) except -1:
        """Everything so far is charged to account 0, and was used before anything from now on."""
        cdef account_book *book = &self._book
        book.charge = <uint16_t *>self._zeros(self.num_blocks, np.uint16)
        book.mark = <int64_t *>self._zeros(self.num_blocks, np.int64)
        book.all = <account *>self._zeros(MAX_ACCOUNTS * sizeof(account), np.uint8)
        book.groups = <account_group *>self._zeros(MAX_ACCOUNTS * sizeof(account_group), np.uint8)
        book.num_blocks = self.num_blocks
        book.count = book.num_groups = 1
        book.groups[0].queue = &self._queue.queue
        change_charged(book, 0, self.num_blocks - self.num_free, 0)
        change_evictable(book, 0, self.num_evictable)
        book.all[0].evictions = self.num_evictions
        book.all[0].max_blocks = _NO_LIMIT
        self.keeps_accounts = True
        return 0

    cdef int _make_sharers(self, int64_t count) except -1:
        """Make room for as many sharers more."""
        cdef account_book *book = &self._book
        cdef int64_t wanted = book.num_sharers + count - book.num_unused
        if wanted <= book.capacity:
            return 0
        sharers = np.zeros(2 * wanted * sizeof(block_sharer), dtype=np.uint8)
        cdef uint8_t[::1] view = sharers
        if book.num_sharers:
            memcpy(&view[0], book.sharers, book.num_sharers * sizeof(block_sharer))
        self._sharers = sharers
        book.sharers = <block_sharer *>&view[0]
        book.capacity = 2 * wanted
        return 0

    # ---- inside

    cdef uint32_t _now(self) except? 0:
        """The present tick, from 1 on."""
        return <uint32_t>(1 + <int64_t>(_TICKS_PER_S * (<double>self._clock() - self._made_at_s)))

    cdef int _miss(self, bytes digests, Py_ssize_t num_hits, uint32_t now) except -1:
        """Observe the blocks of a chain, after its hits, that were evicted."""
        cdef const uint8_t *digest = <const uint8_t *>PyBytes_AS_STRING(digests)
        cdef Py_ssize_t index, width = self.digest_bytes, count = len(digests) // width, gap = 0
        cdef int64_t age
        digest += num_hits * width
        for index in range(num_hits, count):
            if index + GHOSTS_AHEAD < count:
                ghost_prefetch(&self._ages, digest + GHOSTS_AHEAD * width)
            age = ghost_age(&self._ages, digest, now)
            gap = gap + 1 if age < 0 else 0
            if gap == MAX_GHOST_GAP:
                break
            # A ghost stays when its block comes back: then this one was not taken for a hit.
            if age >= 0 and index_find(&self._index, digest) < 0:
                age_add(&self._ages, &self._ages.evict_to_reuse, <uint32_t>age)
            digest += width
        return 0

    cdef int _remember_dropped(self) except -1:
        """Of each cached block, as all of them are about to be dropped, a part of its hash."""
        cdef Py_ssize_t count = 0
        cdef int32_t block
        self._dropped_at = self._now()
        self._dropped = np.empty(self._index.count, dtype=np.uint64)
        if not self._index.count:
            return 0
        cdef uint64_t[::1] words = self._dropped
        for block in range(self.num_blocks):
            if self._state[block] == REGISTERED:
                memcpy(&words[count], index_digest(&self._index, block), sizeof(uint64_t))
                count += 1
        return 0

    cdef int _check_account(self, int32_t account) except -1:
        if not 0 <= account < (self._book.count if self.keeps_accounts else 1):
            raise IndexError(f"account {account} of {self.num_accounts}")
        return 0

    cdef int _check(self, int32_t block_id) except -1:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        return 0

    cdef int _check_all(self, const int32_t[::1] block_ids) except -1:
        cdef Py_ssize_t index
        for index in range(block_ids.shape[0]):
            self._check(block_ids[index])
        return 0

    cdef bytes _digests(self, hashes):
        if hashes.digest_bytes != self.digest_bytes:
            raise ValueError(f"hashes of {hashes.digest_bytes} bytes, not {self.digest_bytes}")
        return hashes.data

    cdef int _register(
        self, int32_t block, const uint8_t *digest, int32_t parent, uint32_t now
    ) except -1:
        """REGISTERED or STANDBY, as it was done; 0 if the hash has other content."""
        cdef uint32_t key = index_key(&self._index, digest)
        cdef uint64_t at = index_slot(&self._index, key, digest)
        cdef int32_t holder = index_block_at(&self._index, at)
        if holder < 0:
            index_set(&self._index, at, key, block)
            self._index.count += 1
            self._state[block] = REGISTERED
            if self._has_nodes:
                contents_enter(&self._contents, block, parent)
        else:
            if self._verifies and not self._has_same(block, holder, parent):
                return 0
            if self._has_nodes:
                contents_share(&self._contents, block, holder)
            ring_add(&self._rings, holder, block)
            self._state[block] = STANDBY
        ages_register(&self._ages, block, now)
        memcpy(index_digest(&self._index, block), digest, self.digest_bytes)
        return self._state[block]

    cdef int _tell_removed(self, Py_ssize_t count) except -1:
        """The first digests of `_removed` are those of blocks that were evicted."""
        self.events.removed(
            PyBytes_FromStringAndSize(<char *>self._removed, count * self.digest_bytes),
            self.digest_bytes,
        )
        return 0

    cdef int _tell_stored(
        self, bytes digests, chain, Py_ssize_t start, Py_ssize_t end, int32_t parent
    ) except -1:
        """Blocks `[start, end)` of the chain were registered. parent: the block before, or -1."""
        if self.events is None:
            return 0
        cdef Py_ssize_t width = self.digest_bytes, size = self.block_size
        extra_keys = chain.extra_keys
        if (end - start) * width < len(digests):
            digests = digests[start * width : end * width]
        self.events.stored(
            digests,
            width,
            None if parent < 0 else self.hash_of(parent),
            chain.token_ids[start * size : end * size],
            None if extra_keys is None else extra_keys[start:end],
        )
        return 0

    cdef void _prefetch_evictions(self, const int32_t *blocks, Py_ssize_t num_left):
        """Start to load what evicting a later block reads: its columns, then its slot."""
        cdef int32_t later
        if num_left > EVICTION_COLUMNS_AHEAD:
            later = blocks[EVICTION_COLUMNS_AHEAD]
            __builtin_prefetch(self._state + later)
            __builtin_prefetch(self._refs + later)
            __builtin_prefetch(self._rings.after + later)
            __builtin_prefetch(self._ages.times + later)
            __builtin_prefetch(index_digest(&self._index, later))
        if num_left > EVICTION_SLOTS_AHEAD:
            later = blocks[EVICTION_SLOTS_AHEAD]
            index_prefetch_slot(&self._index, index_digest(&self._index, later))
            ghost_prefetch(&self._ages, index_digest(&self._index, later))

    cdef bint _evict(self, int32_t block, uint32_t now):
        """The registered block is gone: the longest standing standby takes its place.

        True if there is none, and nobody finds its hash any more.
        """
        cdef uint8_t *digest = index_digest(&self._index, block)
        cdef uint32_t key
        cdef int32_t heir
        if self._rings.after[block]:
            heir = self._rings.after[block] - 1
            ring_remove(&self._rings, block)
            key = index_key(&self._index, digest)
            index_set(&self._index, index_slot(&self._index, key, digest), key, heir)
            self._state[heir] = REGISTERED
            ages_take_over(&self._ages, heir, block)
            return False
        ages_evict(&self._ages, block, digest, now)
        index_remove(&self._index, block)
        self.num_evictions += 1
        if self.keeps_accounts:
            self._book.all[self._book.charge[block]].evictions += 1
        return True

    # ---- verified hits

    cdef int64_t _num_equal(self, const int32_t *blocks, int64_t count, chain) except -1:
        """How many blocks, from the first on, have the content of the chain."""
        cdef const uint32_t[::1] token_ids = chain.token_ids
        extra_keys = chain.extra_keys
        cdef int64_t index
        count = contents_match(&self._contents, blocks, count, &token_ids[0])
        for index in range(count):
            if extra_keys is None or not extra_keys[index]:
                if self._contents.has_keys[blocks[index]]:
                    return index
            elif self._extra_keys.get(blocks[index]) != extra_keys[index]:
                return index
        return count

    cdef int _write(self, const int32_t[::1] block_ids, chain) except -1:
        """Keep the content of blocks that are about to be registered."""
        cdef const uint32_t[::1] token_ids = chain.token_ids
        extra_keys = chain.extra_keys
        cdef Py_ssize_t index, count = block_ids.shape[0]
        if token_ids.shape[0] != count * self.block_size:
            raise ValueError(f"{token_ids.shape[0]} tokens for {count} blocks")
        if self._extra_keys:
            for index in range(count):
                if self._contents.has_keys[block_ids[index]]:
                    del self._extra_keys[block_ids[index]]
        contents_write(&self._contents, &block_ids[0], count, &token_ids[0])
        if extra_keys is not None:
            for index in range(count):
                if extra_keys[index]:
                    self._extra_keys[block_ids[index]] = extra_keys[index]
                    self._contents.has_keys[block_ids[index]] = 1
        return 0

    cdef bint _has_same(self, int32_t block, int32_t holder, int32_t parent) except -1:
        """True if the holder has the content of a block that follows `parent`, a block or -1."""
        if not contents_same(&self._contents, block, holder, parent):
            return False
        if self._contents.has_keys[block] != self._contents.has_keys[holder]:
            return False
        if self._contents.has_keys[block]:
            return self._extra_keys[block] == self._extra_keys[holder]
        return True


cdef object _histogram(const age_counts *counts):
    cdef Py_ssize_t index
    return histogram([counts.counts[index] for index in range(len(BOUNDS_TICKS) + 1)], counts.sum)
