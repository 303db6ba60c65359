"""The block pool in Python and numpy; `prefixcache.core.pool` says what a pool is.

Every block is a row in a few columns, so making a pool of a million blocks is a handful of array
allocations, and the work of a long prompt is a handful of numpy calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixcache.core.accounts import AccountUse, HitCounts
from prefixcache.core.block_ages import TICKS_PER_S, BlockAges, BlockPast
from prefixcache.core.events import EventLog
from prefixcache.core.hashing import BlockHashes, Chain
from prefixcache.core.python.accounts import Accounts
from prefixcache.core.python.block_ages import Ages
from prefixcache.core.python.contents import Contents
from prefixcache.core.python.free_queue import FreeQueue
from prefixcache.core.python.hash_index import PLAIN, REGISTERED, STANDBY, HashIndex
from prefixcache.core.python.nodes import Nodes
from prefixcache.core.snapshot import CachedBlocks
from prefixcache.types import BlockHash, BlockIds


class Pool:
    """`num_blocks` blocks, all blank at first, taken in the order of their ids.

    verify_hits: also keep token ids, extra keys and parent links, and compare them on every hit,
    so that a hash collision is a miss. Costs 4 bytes a token and 16 a block. digest_bytes: of all
    hashes. events: is told what becomes findable and what no longer is, if given; costs 16 bytes a
    block. clock: in seconds, for the ages of blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        verify_hits: bool,
        digest_bytes: int = 32,
        events: EventLog | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.digest_bytes = digest_bytes
        self.events = events
        self.ref_cnt: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.num_evictions = 0
        self._index = HashIndex(num_blocks)
        self._queue = FreeQueue(num_blocks)
        self._num_free = num_blocks
        self._num_evictable = 0
        self._num_quarantined = 0
        self._accounts: Accounts | None = None
        has_nodes = verify_hits or events is not None
        self._nodes = Nodes(num_blocks) if has_nodes else None
        self._contents: Contents | None = None
        if verify_hits and self._nodes is not None:
            self._contents = Contents(num_blocks, block_size, self._nodes)
        self._ages = Ages(num_blocks)
        self._clock = clock
        self._made_at_s = clock()

    # ---- what it holds

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_blank(self) -> int:
        return self._num_free - self._num_evictable

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_referenced(self) -> int:
        """Those in quarantine are not among them, though they have a ref count of 1."""
        return self.num_blocks - self._num_free - self._num_quarantined

    @property
    def num_cached(self) -> int:
        return len(self._index.blocks)

    def state_of(self, block_id: int) -> int:
        """PLAIN, REGISTERED or STANDBY."""
        return int(self._index.state[block_id])

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._index.hash_of[block_id]

    def block_of(self, block_hash: BlockHash) -> int | None:
        """The block registered under a hash; its content is not compared."""
        return self._index.blocks.get(block_hash)

    def free_order(self) -> BlockIds:
        """Free blocks from the next one to be taken to the last one, `[num_free] int32`.

        With accounts: the blank ones and those of group 0, then those of each other group.
        """
        if self._accounts is None:
            return self._queue.order()
        return np.concatenate([queue.order() for queue in self._accounts.queues()])

    @property
    def keeps_content(self) -> bool:
        """Whether `children_of`, `tokens_of` and `keys_of` may be asked: hits are verified."""
        return self._contents is not None

    def children_of(self, parent: int | None, limit: int) -> BlockIds:
        """Registered blocks that follow a cached one, `[at most limit] int32`, by their ids.

        parent: None for those that begin a sequence. Looks at all blocks.
        """
        assert self._nodes is not None
        follows = self._nodes.parent == self._nodes.entry_of(parent)
        found = np.flatnonzero(follows & (self._index.state == REGISTERED))
        return found[:limit].astype(np.int32)

    def tokens_of(self, block_ids: BlockIds) -> npt.NDArray[np.uint32]:
        """Of registered blocks, `[n, B]`: a copy."""
        assert self._contents is not None
        return self._contents.tokens_of(block_ids)

    def keys_of(self, block_id: int) -> bytes:
        """The encoded extra keys of a registered block, `b""` for none."""
        assert self._contents is not None
        return self._contents.keys_of(block_id)

    def past_of(self, block_hash: BlockHash) -> BlockPast:
        """What is remembered of a hash that is not cached."""
        return self._ages.past_of(block_hash, self._now())

    def is_private(self, block_id: int) -> bool:
        """True if one holder has it and nobody can find it: its slots may be written."""
        return bool(self.ref_cnt[block_id] == 1) and self._index.state[block_id] == PLAIN

    # ---- calls

    def match(self, chain: Chain, limit: int) -> BlockIds:
        """Blocks of the longest cached prefix of the chain, at most `limit`. Changes nothing."""
        found: list[int] = []
        get = self._index.blocks.get
        for block_hash in chain.hashes[:limit]:
            block = get(block_hash)
            if block is None:
                break
            found.append(block)
        block_ids = np.array(found, dtype=np.int32)
        if self._contents is not None and found:
            block_ids = block_ids[: self._contents.num_equal(block_ids, chain)]
        return block_ids

    def guess(self, hashes: BlockHashes) -> BlockIds | None:
        """None: a walk in Python would hold up others as much as one under the lock."""
        return None

    def acquire(self, block_ids: BlockIds, account: int = 0) -> None:
        """One more reference of an account on each of distinct, cached or referenced blocks."""
        is_free = self.ref_cnt[block_ids] == 0
        free = block_ids[is_free]
        if len(free):
            self._leave_queue(free)
            self._num_free -= len(free)
            self._num_evictable -= len(free)
        if self._accounts is not None:
            self._accounts.reuse(free, account)
            self._accounts.share(block_ids[~is_free], account)
        self.ref_cnt[block_ids] += 1

    def acquire_hits(self, block_ids: BlockIds, chain: Chain, account: int = 0) -> None:
        """`acquire` for the cached start of a chain that an Allocate asks for.

        That uses those blocks; of the rest of the chain, those that were evicted are observed.
        """
        self.acquire(block_ids, account)
        now = self._now()
        if len(block_ids):
            self._ages.hit(block_ids, now)
        if self.num_evictions:
            self._ages.miss(chain.hashes[len(block_ids) :], now, self._index.blocks.__contains__)

    def take(self, count: int, account: int = 0) -> BlockIds:
        """`count` plain blocks with one reference of an account each, in the order of eviction.

        Cached ones among them are evicted. The caller has checked `num_available`.
        """
        if self._accounts is None:
            taken = self._queue.pop_head(count)
        else:
            taken = self._accounts.pop(account, self.num_blank, count)
        self._num_free -= count
        self.ref_cnt[taken] = 1
        cached = taken[self._index.state[taken] == REGISTERED]
        if len(cached):
            self._num_evictable -= len(cached)
            self._evict(cached)
        if self._accounts is not None:
            self._accounts.charge[taken] = account
        return taken

    def release(self, block_ids: BlockIds, account: int = 0) -> None:
        """One reference of an account less on each of distinct blocks of a table, last to first.

        Blocks that reach 0 go to the tail of the free queue if registered, and to its head, as one
        group, if not. A standby that reaches 0 becomes blank, and its hash's registered block is
        used at that moment: if that is free, it moves to the tail in the standby's turn.
        """
        if not len(block_ids):
            return
        backwards = block_ids[::-1]
        self.ref_cnt[backwards] -= 1
        is_free = self.ref_cnt[backwards] == 0
        freed = backwards[is_free]
        states = self._index.state[freed]
        registered = states == REGISTERED
        if self._accounts is not None:
            self._accounts.leave(backwards[~is_free], account, self.ref_cnt)
            self._accounts.free(freed, registered)
        if (states == STANDBY).any():
            to_tail = self._retire_standbys(freed, states)
        else:
            to_tail = freed[registered]
        self._ages.use(to_tail, self._now())
        self._num_free += len(freed)
        self._num_evictable += int(np.count_nonzero(registered))
        if self._accounts is None:
            self._queue.push_tail(to_tail)
        else:
            self._accounts.push_tail(to_tail)
        self._queue.push_head(freed[~registered])

    def quarantine(self, block_ids: BlockIds, start: int, account: int = 0) -> BlockIds:
        """`release`, but for plain blocks from place `start` on that nobody else has.

        Returns those. They keep their reference and are quarantined until `end_quarantine`: neither
        free nor anybody's.
        """
        stays = (self.ref_cnt[block_ids] == 1) & (self._index.state[block_ids] == PLAIN)
        stays[:start] = False
        self.release(block_ids[~stays], account)
        quarantined: BlockIds = block_ids[stays]
        self._num_quarantined += len(quarantined)
        return quarantined

    def end_quarantine(self, block_ids: BlockIds, account: int = 0) -> None:
        """Quarantined blocks are blank from now on."""
        self._num_quarantined -= len(block_ids)
        self.release(block_ids, account)

    def register(self, block_ids: BlockIds, chain: Chain, parent: int | None) -> int:
        """Make referenced plain blocks, whose K/V are complete, findable by their hashes.

        block_ids: the blocks of `chain`, `[len(chain.hashes)]`. parent: the cached block before
        them, None for the start of a sequence. A block whose hash is taken by the same content
        becomes a standby. Returns how many blocks were registered or stand by: fewer than given
        if a hash is taken by other content, and then nothing from that block on is registered.
        """
        if self._contents is not None:
            self._contents.write(block_ids, chain)
        hashes = list(chain.hashes)
        done = 0
        while done < len(block_ids):
            before = int(block_ids[done - 1]) if done else parent
            num_new = self._register_new(block_ids[done:], hashes[done:], before)
            if self.events is not None and num_new:
                self._tell_stored(chain, done, done + num_new, before)
            done += num_new
            if num_new == 0:
                if not self._stand_by(int(block_ids[done]), hashes[done], before):
                    return done
                done += 1
        return done

    def ages(self) -> BlockAges:
        """What was observed of blocks' ages since the pool was made."""
        return self._ages.read()

    def clear(self) -> None:
        """Drop every hash. Free cached blocks become blank where they are in the queue.

        With accounts: those of each group behind those of the one before.
        """
        self._ages.drop(self._index.blocks, self._now())
        self._index.clear()
        self._num_evictable = 0
        if self._contents is not None:
            self._contents.clear()
        if self._accounts is not None:
            self._accounts.clear()
        if self.events is not None:
            self.events.cleared()

    def copy_cached(self, room: CachedBlocks) -> int:
        """Copy the columns of all registered blocks; returns how many. Needs `events`."""
        assert self._nodes is not None
        count, digests = len(self._index.blocks), b"".join(self._index.blocks)
        room.digests[:count] = np.frombuffer(digests, np.uint8).reshape(count, self.digest_bytes)
        blocks = np.fromiter(self._index.blocks.values(), dtype=np.int32, count=count)
        room.entries[:count] = self._nodes.entry[blocks]
        room.parents[:count] = self._nodes.parent[blocks]
        return count

    # ---- accounts

    @property
    def keeps_accounts(self) -> bool:
        return self._accounts is not None

    @property
    def num_accounts(self) -> int:
        return 1 if self._accounts is None else len(self._accounts)

    def set_account(
        self, account: int, group: int, guaranteed: int, max_blocks: int | None
    ) -> None:
        """Keep accounts from now on, and give one its rules. `max_blocks`: None for no limit.

        The next number makes a new account, in a group that there is or the next one; any other
        changes an old one, whose group stays. Raises ValueError for anything else, and for a sum
        of guarantees above the number of blocks.
        """
        accounts = self._accounts
        if accounts is None:
            accounts = Accounts(self._queue, self.num_blocks)
            num_held = self.num_blocks - self._num_free
            accounts.start(num_held, self._num_evictable, self.num_evictions)
        accounts.set_rules(account, group, guaranteed, max_blocks)
        self._accounts = accounts

    def account(self, account: int) -> AccountUse:
        """An account as it stands."""
        if self._accounts is not None:
            return self._accounts.use(account)
        held = self.num_blocks - self._num_free
        return AccountUse(0, 0, None, held, held, self._num_evictable, self.num_evictions)

    def num_unreserved(self) -> int:
        """Blocks that are neither held nor guaranteed to an account that lacks them.

        Below 0 while borrowed blocks stand against a guarantee that was raised.
        """
        if self._accounts is None:
            return self._num_free
        return self.num_blocks - self._accounts.reserved

    def num_available(self, account: int = 0, num_reserved: int = 0) -> int:
        """Blocks that an account can have now, when `num_reserved` go to what it shares."""
        if self._accounts is None:
            return self._num_free
        return self._accounts.num_available(account, self.num_blank, num_reserved)

    def num_allowed(self, account: int = 0) -> int:
        """Blocks that an account may hold at most, those guaranteed to others regarded."""
        return self.num_blocks if self._accounts is None else self._accounts.num_allowed(account)

    def max_blocks(self, account: int = 0) -> int | None:
        """The limit that was set for an account."""
        return None if self._accounts is None else self._accounts.use(account).max_blocks

    def num_held(self, account: int = 0) -> int:
        """Blocks that an account references, or has in quarantine."""
        if self._accounts is None:
            return self.num_blocks - self._num_free
        return self._accounts.use(account).held

    def count_hits(self, block_ids: BlockIds, account: int = 0) -> HitCounts:
        """What it would take an account to reference distinct cached blocks. Changes nothing."""
        is_free = self.ref_cnt[block_ids] == 0
        if self._accounts is not None:
            return self._accounts.count_hits(block_ids, is_free, account)
        num_free = int(np.count_nonzero(is_free))
        return HitCounts(num_free, num_free, 0, len(block_ids))

    # ---- inside

    def _now(self) -> int:
        """The present tick, from 1 on."""
        return 1 + int(TICKS_PER_S * (self._clock() - self._made_at_s)) & 2**32 - 1

    def _leave_queue(self, evictable: BlockIds) -> None:
        if self._accounts is None:
            self._queue.remove(evictable)
        else:
            self._accounts.remove(evictable)

    def _register_new(
        self, block_ids: BlockIds, hashes: Sequence[BlockHash], parent: int | None
    ) -> int:
        """Register blocks up to the first whose hash is taken; returns how many."""
        registered = self._index.register(block_ids, hashes)
        self._ages.register(registered, self._now())
        if self._nodes is not None and len(registered):
            self._nodes.enter(registered, parent)
        return len(registered)

    def _tell_stored(self, chain: Chain, start: int, end: int, parent: int | None) -> None:
        """Blocks `[start, end)` of the chain were registered."""
        assert self.events is not None
        self.events.stored(
            chain.hashes[start:end].data,
            self.digest_bytes,
            None if parent is None else self._index.hash_of[parent],
            chain.token_ids[start * self.block_size : end * self.block_size],
            None if chain.extra_keys is None else chain.extra_keys[start:end],
        )

    def _stand_by(self, block: int, block_hash: BlockHash, parent: int | None) -> bool:
        """Let a block stand by for the one that has its hash; False if that has other content."""
        holder = self._index.blocks[block_hash]
        if self._contents is not None and not self._contents.has_same(block, holder, parent):
            return False
        if self._nodes is not None:
            self._nodes.share(block, holder)
        self._index.stand_by(block, block_hash)
        self._ages.register(block, self._now())
        return True

    def _evict(self, registered: BlockIds) -> None:
        gone, heirs = self._index.remove(registered)
        for heir, block in heirs.items():
            self._ages.take_over(heir, block)
        if not gone:
            return
        self.num_evictions += len(gone)
        if self._accounts is not None:
            for block in gone:
                self._accounts.count_eviction(block)
        self._ages.evict(np.array(list(gone), dtype=np.int32), gone.values(), self._now())
        if self.events is not None:
            self.events.removed(b"".join(gone.values()), self.digest_bytes)

    def _retire_standbys(self, freed: BlockIds, states: npt.NDArray[np.uint8]) -> BlockIds:
        """What goes to the tail, in turn; standbys among `freed` become plain."""
        to_tail: list[int] = []
        for block, state in zip(freed.tolist(), states.tolist(), strict=True):
            if state == REGISTERED:
                to_tail.append(block)
            elif state == STANDBY:
                holder = self._index.end_standby(block)
                self._ages.use(holder, self._now())
                if self.ref_cnt[holder] == 0:
                    self._leave_queue(np.array([holder], dtype=np.int32))
                    to_tail.append(holder)
        return np.array(to_tail, dtype=np.int32)
