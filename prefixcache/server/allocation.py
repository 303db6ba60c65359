"""One Allocate, checked and hashed: what it does under the core's lock, at once or after a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefixcache.core.pending import Waiter
from prefixcache.core.sequence import Prompt
from prefixcache.core.sessions import CallOrder
from prefixcache.errors import DrainingError
from prefixcache.server.daemon import Daemon
from prefixcache.types import AllocateResult, CacheUse, FullHit


class Allocation(NamedTuple):
    """owner: its key. order: None of a client that numbers no calls.

    A named tuple, which is made faster than a frozen dataclass: each Allocate makes one.
    """

    daemon: Daemon
    owner: bytes
    order: CallOrder | None
    request_id: str
    prompt: Prompt
    num_lookahead_tokens: int
    cache_use: CacheUse
    full_hit: FullHit
    resumed: bool
    account: int

    def apply(self) -> AllocateResult:
        """`Sequences.allocate`, in its turn."""
        sequences = self.daemon.sequences
        if self.order is not None:
            sequences.live.take_turn(self.owner, self.order)
        return sequences.allocate(
            self.owner,
            self.request_id,
            self.prompt,
            num_lookahead_tokens=self.num_lookahead_tokens,
            cache_use=self.cache_use,
            full_hit=self.full_hit,
            resumed=self.resumed,
            account=self.account,
        )

    def look(self, wake: Callable[[], object]) -> Waiter | None:
        """`Sequences.wait_for_pending`, in its turn. Raises DrainingError."""
        # Under the lock, or a drain could wake those that wait just before this one does.
        if self.daemon.is_draining:
            raise DrainingError
        sequences = self.daemon.sequences
        sequences.live.take_turn(self.owner, self.order)
        return sequences.wait_for_pending(
            self.owner,
            self.request_id,
            self.prompt,
            wake,
            num_lookahead_tokens=self.num_lookahead_tokens,
            cache_use=self.cache_use,
            full_hit=self.full_hit,
            account=self.account,
        )
