"""The naive block manager's accounts: charges, guarantees, limits and who loses blocks first.

Everything but who holds a block, and since when, is counted anew from all blocks each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BLANK, REGISTERED, STANDBY = "plain", "registered", "standby"

Content = tuple[tuple[tuple[int, ...], tuple[tuple, ...]], ...]
"""(token ids, extra keys) of a block and of all blocks before it."""


class Refused(Exception):
    """The name of the error class, and its numbers."""

    def __init__(self, name: str, **numbers: int) -> None:
        super().__init__(name)
        self.name = name
        self.numbers = numbers


@dataclass
class Block:
    """`kv[layer][offset]` identifies the K/V in a slot; None is junk.

    holders: the accounts that reference it, the one that has for the longest first. charged_to:
    that one; of a free block, the last one that was.
    """

    block_id: int
    kv: list[list[int | None]]
    refs: int = 0
    state: str = BLANK
    hash: bytes | None = None
    content: Content | None = None
    holders: list[int] = field(default_factory=list)
    charged_to: int = 0


@dataclass
class ModelAccount:
    """What a tenant may have. limit: of blocks held; None for none."""

    group: int
    guaranteed: int = 0
    limit: int | None = None
    evictions: int = 0


class ModelAccounts:
    """`free_ids` are in the order of their last use, blank ones first."""

    blocks: list[Block]
    free_ids: list[int]
    accounts: list[ModelAccount]

    def set_account(self, account: int, group: int, guaranteed: int, limit: int | None) -> None:
        if account == len(self.accounts):
            self.accounts.append(ModelAccount(group))
        self.accounts[account].guaranteed = guaranteed
        self.accounts[account].limit = limit

    def held(self, account: int) -> int:
        return sum(account in block.holders for block in self.blocks)

    def private(self, account: int) -> int:
        return sum(block.holders == [account] for block in self.blocks)

    def evictable(self, account: int) -> int:
        return sum(
            block.state == REGISTERED and not block.refs and block.charged_to == account
            for block in self.blocks
        )

    def used(self, group: int) -> int:
        """Blocks charged to the accounts of a group, blank ones not."""
        return sum(
            (block.refs > 0 or block.state == REGISTERED)
            and self.accounts[block.charged_to].group == group
            for block in self.blocks
        )

    def promised(self, group: int) -> int:
        return sum(one.guaranteed for one in self.accounts if one.group == group)

    def reserved(self) -> int:
        return sum(len(block.holders) > 1 for block in self.blocks) + sum(
            max(one.guaranteed, self.private(number)) for number, one in enumerate(self.accounts)
        )

    def findable(self, account: int) -> int:
        """How many blocks in a row the order of eviction would give to an account."""
        mine = self.accounts[account].group
        free = [self.blocks[block_id] for block_id in self.free_ids]
        count = sum(block.state == BLANK for block in free)
        for group in {one.group for one in self.accounts}:
            evictable = sum(
                block.state == REGISTERED and self.accounts[block.charged_to].group == group
                for block in free
            )
            over = max(0, self.used(group) - self.promised(group))
            count += evictable if group == mine else min(evictable, over)
        return count

    def available(self, account: int, for_sharing: int = 0) -> int:
        """Without a raised guarantee that others still stand against, `findable` is no less."""
        left = max(0, self.accounts[account].guaranteed - self.private(account))
        rest = len(self.blocks) - self.reserved() - for_sharing
        return left + rest if rest >= 0 else min(left, self.findable(account))

    def allowed(self, account: int) -> int:
        """What an account could hold if the others had just what is guaranteed to them."""
        others = sum(one.guaranteed for one in self.accounts) - self.accounts[account].guaranteed
        limit = self.accounts[account].limit
        return min(len(self.blocks) - others, len(self.blocks) if limit is None else limit)

    def _for_sharing(self, account: int, hits: list[int]) -> int:
        """By how much `reserved` grows as the account joins in blocks that others have alone."""
        before = self.reserved()
        joined = [
            block
            for block in map(self.blocks.__getitem__, hits)
            if len(block.holders) == 1 and account not in block.holders
        ]
        for block in joined:
            block.holders.append(account)
        more = self.reserved() - before
        for block in joined:
            block.holders.remove(account)
        return more

    def _hits_for(self, account: int, hits: list[int]) -> list[int]:
        unreserved = max(0, len(self.blocks) - self.reserved())
        while self._for_sharing(account, hits) > unreserved:
            hits = hits[:-1]
        return hits

    def _check_room(self, account: int, hits: list[int], num_blocks: int) -> None:
        if num_blocks > len(self.blocks):
            raise Refused("ExceedsPoolError", needed=num_blocks, num_blocks=len(self.blocks))
        new = num_blocks - len(hits)
        needed = new + sum(self.blocks[hit].refs == 0 for hit in hits)
        added = new + sum(account not in self.blocks[hit].holders for hit in hits)
        self._check_limit(account, num_blocks, added)
        available = self.available(account, self._for_sharing(account, hits))
        if needed > available:
            raise Refused("NoRoomError", needed=needed, free=available, **self._taken(account))

    def _taken(self, account: int) -> dict[str, int]:
        """What a refused account is told of the blocks that are not free."""
        if len(self.accounts) > 1:
            return {"referenced": self.held(account)}
        kept = {"quarantined": self.num_quarantined()} if self.num_quarantined() else {}
        return {"referenced": self._num_referenced(), **kept}

    def num_quarantined(self) -> int:
        raise NotImplementedError

    def _num_referenced(self) -> int:
        return len(self.blocks) - len(self.free_ids) - self.num_quarantined()

    def _check_limit(self, account: int, num_blocks: int, added: int) -> None:
        held, allowed = self.held(account), self.allowed(account)
        limit = self.accounts[account].limit
        if added > 0 and len(self.accounts) > 1:
            if num_blocks > allowed:
                raise Refused("QuotaExceededError", needed=num_blocks, held=held, max=allowed)
            if limit is not None and held + added > limit:
                raise Refused("QuotaExceededError", needed=added, held=held, max=allowed)

    def _next_block(self, account: int) -> Block:
        mine = self.accounts[account].group
        free = [self.blocks[block_id] for block_id in self.free_ids]
        over = {
            one.group for one in self.accounts if self.used(one.group) > self.promised(one.group)
        }
        choices = (
            [block for block in free if block.state == BLANK]
            or [block for block in free if self._group_of(block.block_id) in over]
            or [block for block in free if self._group_of(block.block_id) == mine]
        )
        return choices[0]

    def _group_of(self, block_id: int) -> int:
        """Of the group's queue that a free block is in: blank ones are in that of group 0."""
        block = self.blocks[block_id]
        return 0 if block.state == BLANK else self.accounts[block.charged_to].group
