"""What waits for a thread: in order for each tenant, and the tenants in turn.

However many calls one tenant sends, another's wait behind one of them at a time. It is the fair
queue of Nagle (RFC 970), over calls. What is of no tenant, as are calls whose credentials nobody
knows, takes its turn as one more. Guarded by its owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from prefixcache.server.places import Places

_Work = TypeVar("_Work")


class FairQueue(Generic[_Work]):
    """places: of what waits here."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._by_tenant: dict[str, deque[_Work]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, tenant: str, work: _Work) -> bool:
        """False if there is no place for it."""
        if not self._places.take(tenant):
            return False
        self._by_tenant.setdefault(tenant, deque()).append(work)
        self._num_waiting += 1
        return True

    def first(self) -> _Work:
        """What `take` gives. The queue is not empty."""
        return next(iter(self._by_tenant.values()))[0]

    def take(self) -> _Work:
        """The first of the tenant whose turn it is. The queue is not empty."""
        tenant = next(iter(self._by_tenant))
        waiting = self._by_tenant.pop(tenant)
        work = waiting.popleft()
        if waiting:
            self._by_tenant[tenant] = waiting  # at the end, behind the others
        self._leave(tenant)
        return work

    def take_late(self, is_late: Callable[[_Work], bool]) -> list[_Work]:
        """What came so long ago, each tenant's oldest first."""
        late = []
        for tenant, waiting in list(self._by_tenant.items()):
            while waiting and is_late(waiting[0]):
                late.append(waiting.popleft())
                self._leave(tenant)
            if not waiting:
                del self._by_tenant[tenant]
        return late

    def _leave(self, tenant: str) -> None:
        self._num_waiting -= 1
        self._places.give_back(tenant)
