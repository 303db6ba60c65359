"""Charges, guarantees and the order of eviction of accounts, in Python.

`prefixcache.core.accounts` has the rules. Owned by the pool; guarded by the core's lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.core.accounts import MAX_ACCOUNTS, AccountUse, HitCounts
from prefixcache.core.python.free_queue import FreeQueue
from prefixcache.types import BlockIds


@dataclass(slots=True)
class _Account:
    """charged: referenced blocks; shared: those of them with sharers; joined: charged to others."""

    group: int
    guaranteed: int = 0
    max_blocks: int | None = None
    charged: int = 0
    shared: int = 0
    joined: int = 0
    evictable: int = 0
    evictions: int = 0

    @property
    def private(self) -> int:
        return self.charged - self.shared

    @property
    def reserve(self) -> int:
        return max(self.guaranteed, self.private)


@dataclass(slots=True)
class _Group:
    """queue: its evictable blocks; that of group 0 has the blank ones of all before them."""

    queue: FreeQueue
    guaranteed: int = 0
    used: int = 0

    @property
    def is_over(self) -> bool:
        return self.used > self.guaranteed


class Accounts:
    """All accounts of a pool of `num_blocks` blocks; `queue` is the pool's.

    charge: the account that each block is charged to, or was last. reserved: as the rules say. A
    sharer is an account that references a block which is charged to another.
    """

    def __init__(self, queue: FreeQueue, num_blocks: int) -> None:
        self.charge: npt.NDArray[np.uint16] = np.zeros(num_blocks, dtype=np.uint16)
        self.reserved = 0
        self._num_blocks = num_blocks
        self._last_used: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._clock = 0
        self._sharers: dict[int, dict[int, int]] = {}
        self._accounts = [_Account(group=0)]
        self._groups = [_Group(queue)]

    def __len__(self) -> int:
        return len(self._accounts)

    def start(self, num_referenced: int, num_evictable: int, num_evictions: int) -> None:
        """Everything so far is charged to account 0, and was used before anything from now on."""
        self._change_charged(0, num_referenced, 0)
        self._change_evictable(0, num_evictable)
        self._accounts[0].evictions = num_evictions

    def set_rules(self, account: int, group: int, guaranteed: int, max_blocks: int | None) -> None:
        """`Pool.set_account`; nothing is changed when it raises."""
        is_new = account == len(self)
        if not 0 <= account < MAX_ACCOUNTS or account > len(self):
            raise ValueError(f"account {account} of {len(self)}, at most {MAX_ACCOUNTS}")
        if not is_new and group != self._accounts[account].group:
            raise ValueError(f"account {account} is of group {self._accounts[account].group}")
        if not 0 <= group <= len(self._groups):
            raise ValueError(f"group {group} of {len(self._groups)}")
        others = sum(other.guaranteed for other in self._groups)
        others -= 0 if is_new else self._accounts[account].guaranteed
        if not 0 <= guaranteed <= self._num_blocks - others:
            raise ValueError(f"{guaranteed} blocks guaranteed, {others} to others")
        if max_blocks is not None and max_blocks < guaranteed:
            raise ValueError(f"{guaranteed} blocks guaranteed, and at most {max_blocks}")
        if group == len(self._groups):
            self._groups.append(_Group(self._groups[0].queue.another(group)))
        if is_new:
            self._accounts.append(_Account(group))
        one = self._accounts[account]
        one.max_blocks = max_blocks
        self.reserved -= one.reserve
        self._groups[group].guaranteed += guaranteed - one.guaranteed
        one.guaranteed = guaranteed
        self.reserved += one.reserve

    # ---- what there is

    def queues(self) -> list[FreeQueue]:
        return [group.queue for group in self._groups]

    def use(self, account: int) -> AccountUse:
        one = self._accounts[account]
        return AccountUse(
            group=one.group,
            guaranteed=one.guaranteed,
            max_blocks=one.max_blocks,
            held=one.charged + one.joined,
            private=one.private,
            evictable=one.evictable,
            evictions=one.evictions,
        )

    def num_allowed(self, account: int) -> int:
        one = self._accounts[account]
        others = sum(group.guaranteed for group in self._groups) - one.guaranteed
        allowed = self._num_blocks - others
        return allowed if one.max_blocks is None else min(allowed, one.max_blocks)

    def num_available(self, account: int, num_blank: int, num_reserved: int) -> int:
        one = self._accounts[account]
        left = max(0, one.guaranteed - one.private)
        unreserved = self._num_blocks - self.reserved - num_reserved
        if unreserved >= 0:
            return left + unreserved
        return min(left, self._num_findable(one.group, num_blank))

    def count_hits(
        self, block_ids: BlockIds, is_free: npt.NDArray[np.bool_], account: int
    ) -> HitCounts:
        num_free = int(np.count_nonzero(is_free))
        charges = self.charge[block_ids]
        others = np.flatnonzero(~is_free & (charges != account)).tolist()
        num_new, num_reserved, num_takeable = num_free, 0, len(block_ids)
        unreserved = max(0, self._num_blocks - self.reserved)
        made_shared = Counter[int]()
        for index in others:
            sharers = self._sharers.get(int(block_ids[index]))
            num_new += sharers is None or account not in sharers
            if sharers is None:
                owner = int(charges[index])
                over = self._accounts[owner].private - self._accounts[owner].guaranteed
                made_shared[owner] += 1
                num_reserved += made_shared[owner] > max(0, over)
                if num_reserved > unreserved:
                    num_takeable = min(num_takeable, index)
        return HitCounts(num_free, num_new, num_reserved, num_takeable)

    # ---- changes

    def remove(self, evictable: BlockIds) -> None:
        """Take blocks out of the queues of their groups."""
        for group, blocks in self._by_group(evictable):
            self._groups[group].queue.remove(blocks)

    def push_tail(self, evictable: BlockIds) -> None:
        """Blocks were used last, in this order."""
        count = len(evictable)
        self._last_used[evictable] = np.arange(self._clock + 1, self._clock + 1 + count)
        self._clock += count
        for group, blocks in self._by_group(evictable):
            self._groups[group].queue.push_tail(blocks)

    def reuse(self, evictable: BlockIds, account: int) -> None:
        """Blocks that were evictable are referenced by an account."""
        for owner, count in self._by_charge(evictable):
            self._change_evictable(owner, -count)
        self.charge[evictable] = account
        self._change_charged(account, len(evictable), 0)

    def share(self, referenced: BlockIds, account: int) -> None:
        """One more reference of an account on each of referenced blocks."""
        charges = self.charge[referenced]
        for block in referenced[charges != account].tolist():
            if block not in self._sharers:
                self._sharers[block] = {}
                self._change_charged(int(self.charge[block]), 0, 1)
            sharers = self._sharers[block]
            if account not in sharers:
                self._accounts[account].joined += 1
            sharers[account] = sharers.get(account, 0) + 1

    def leave(self, referenced: BlockIds, account: int, ref_cnt: npt.NDArray[np.int32]) -> None:
        """One reference of an account less on blocks that still have `ref_cnt` ones."""
        if not self._sharers:
            return
        for block in referenced.tolist():
            if block in self._sharers:
                self._leave(block, account, int(ref_cnt[block]))

    def _leave(self, block: int, account: int, num_left: int) -> None:
        sharers, owner = self._sharers[block], int(self.charge[block])
        if account == owner:
            if num_left > sum(sharers.values()):
                return
            heir = next(iter(sharers))
            del sharers[heir]
            self._accounts[heir].joined -= 1
            self._change_charged(owner, -1, -1)
            self.charge[block] = heir
            self._change_charged(heir, 1, int(bool(sharers)))
        else:
            sharers[account] -= 1
            if sharers[account]:
                return
            del sharers[account]
            self._accounts[account].joined -= 1
            if not sharers:
                self._change_charged(owner, 0, -1)
        if not sharers:
            del self._sharers[block]

    def free(self, freed: BlockIds, is_evictable: npt.NDArray[np.bool_]) -> None:
        """The last reference of blocks is gone."""
        for owner, count in self._by_charge(freed):
            self._change_charged(owner, -count, 0)
        for owner, count in self._by_charge(freed[is_evictable]):
            self._change_evictable(owner, count)

    def clear(self) -> None:
        """All free blocks are blank."""
        for group in self._groups[1:]:
            self._groups[0].queue.push_tail(group.queue.pop_head(len(group.queue)))
        for number, one in enumerate(self._accounts):
            self._change_evictable(number, -one.evictable)

    def count_eviction(self, block: int) -> None:
        self._accounts[int(self.charge[block])].evictions += 1

    def pop(self, account: int, num_blank: int, count: int) -> BlockIds:
        """Take blocks out of the queues for an account; `charge` is left as it is."""
        mine = self._accounts[account].group
        assert 0 <= count <= self._num_findable(mine, num_blank)
        blank = self._groups[0].queue.pop_head(min(count, num_blank))
        self._change_charged(account, len(blank), 0)
        taken: list[BlockIds] = [blank]
        missing = count - len(blank)
        while missing:
            taken.append(self._pop_run(account, mine, missing))
            missing -= len(taken[-1])
        return np.concatenate(taken)

    # ---- inside

    def _pop_run(self, account: int, mine: int, limit: int) -> BlockIds:
        """At least one and at most `limit` blocks that one group loses, when none is blank."""
        number, until = self._next_to_lose(mine)
        loser, taker = self._groups[number], self._groups[mine]
        limit = min(limit, len(loser.queue))
        if number != mine:
            limit = min(limit, loser.used - loser.guaranteed)
            if not taker.is_over:
                limit = min(limit, taker.guaranteed - taker.used + 1)
        last_used = self._last_used[loser.queue.peek_head(limit)]
        run = loser.queue.pop_head(int(np.searchsorted(last_used, until)))
        for owner, count in self._by_charge(run):
            self._change_evictable(owner, -count)
        self._change_charged(account, len(run), 0)
        return run

    def _next_to_lose(self, mine: int) -> tuple[int, int]:
        """The group that loses the next block to one of `mine`, and when another one's was used."""
        never = int(np.iinfo(np.int64).max)
        heads = sorted(
            (int(self._last_used[group.queue.peek_head(1)[0]]), number)
            for number, group in enumerate(self._groups)
            if len(group.queue) and group.is_over
        )
        number = heads[0][1] if heads else mine
        return number, heads[1][0] if len(heads) > 1 else never

    def _num_findable(self, mine: int, num_blank: int) -> int:
        """Blocks that the order of eviction can find for an account of a group."""
        found = num_blank
        for number, group in enumerate(self._groups):
            evictable = len(group.queue) - (0 if number else num_blank)
            over = max(0, group.used - group.guaranteed)
            found += evictable if number == mine else min(evictable, over)
        return found

    def _by_charge(self, block_ids: BlockIds) -> list[tuple[int, int]]:
        """Accounts that blocks are charged to, and how many to each."""
        if not len(block_ids):
            return []
        counts = np.bincount(self.charge[block_ids])
        return [(int(number), int(counts[number])) for number in np.flatnonzero(counts)]

    def _by_group(self, block_ids: BlockIds) -> list[tuple[int, BlockIds]]:
        """Blocks apart by the group of their charge, in the order given."""
        groups = np.array([account.group for account in self._accounts])[self.charge[block_ids]]
        return [(int(group), block_ids[groups == group]) for group in np.unique(groups)]

    def _change_charged(self, account: int, charged: int, shared: int) -> None:
        one = self._accounts[account]
        self.reserved -= one.reserve
        one.charged += charged
        one.shared += shared
        self.reserved += one.reserve + shared
        self._groups[one.group].used += charged

    def _change_evictable(self, account: int, change: int) -> None:
        one = self._accounts[account]
        one.evictable += change
        self._groups[one.group].used += change
