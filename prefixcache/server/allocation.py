"""One Allocate, checked and hashed: what it does under the core's lock, at once or after a wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefixcache.core.pending import Waiter
from prefixcache.core.sequence import Prompt
from prefixcache.core.sequences import Sequences
from prefixcache.core.sessions import CallOrder
from prefixcache.errors import DrainingError
from prefixcache.server.daemon import Daemon
from prefixcache.types import AllocateResult, CacheUse, FullHit


@dataclass(frozen=True, slots=True)
class Allocation:
    """owner: its key. order: None of a client that numbers no calls."""

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
        self._take_turn()
        return self._sequences.allocate(
            self.owner, self.request_id, self.prompt, resumed=self.resumed, **self._options
        )

    def look(self, wake: Callable[[], object]) -> Waiter | None:
        """`Sequences.wait_for_pending`, in its turn. Raises DrainingError."""
        # Under the lock, or a drain could wake those that wait just before this one does.
        if self.daemon.is_draining:
            raise DrainingError
        self._take_turn()
        return self._sequences.wait_for_pending(
            self.owner, self.request_id, self.prompt, wake, **self._options
        )

    @property
    def _sequences(self) -> Sequences:
        return self.daemon.sequences

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "num_lookahead_tokens": self.num_lookahead_tokens,
            "cache_use": self.cache_use,
            "full_hit": self.full_hit,
            "account": self.account,
        }

    def _take_turn(self) -> None:
        self._sequences.live.take_turn(self.owner, self.order)
