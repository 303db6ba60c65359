"""Places of which every tenant can always have its share.

The first tenant that opens as many sessions as there may be would leave none to the others, and the
blocks that are guaranteed to them would be of no use. So it is with places as with blocks (see
`prefixcache.core.accounts`): of N tenants each can always have the N-th part, and more as long as
nobody has reserved it. Guarded by its owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


class Shares:
    """`limit` places, for all without a difference until `share_among`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = Counter[Hashable]()
        self._num_held = 0
        self._tenants: frozenset[Hashable] = frozenset()
        self._share = 0
        self._num_lacking = 0

    def share_among(self, tenants: Iterable[Hashable]) -> None:
        """These are the tenants from now on. Whoever has more than is left to it keeps that."""
        self._tenants = frozenset(tenants)
        self._share = self._limit // max(1, len(self._tenants))
        self._num_lacking = sum(map(self._lacks, self._tenants))

    def has_place(self, tenant: Hashable) -> bool:
        """Whether one more of the tenant leaves to the others what they lack of their shares."""
        return self.num_left(tenant) > 0

    def num_left(self, tenant: Hashable) -> int:
        """How many more the tenant can have; below 0 if there were fewer to share before."""
        return self._limit - self._num_held - self._num_lacking + self._lacks(tenant)

    def add(self, tenant: Hashable, count: int = 1) -> None:
        self._change(tenant, count)

    def remove(self, tenant: Hashable) -> None:
        self._change(tenant, -1)

    def _change(self, tenant: Hashable, change: int) -> None:
        self._num_lacking -= self._lacks(tenant)
        self._held[tenant] += change
        self._num_held += change
        self._num_lacking += self._lacks(tenant)
        if not self._held[tenant]:
            del self._held[tenant]

    def _lacks(self, tenant: Hashable) -> int:
        if tenant not in self._tenants:
            return 0
        return max(0, self._share - self._held[tenant])
