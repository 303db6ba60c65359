"""Places that the tenants of the auth file share: of streams, and of calls that wait.

The rule is that of `prefixcache.core.shares`: each of N tenants can always have the N-th part of
them. Without tenants they are whose they are first. The file may be read again, so who the tenants
are is asked for each time. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from prefixcache.core.shares import Shares
from prefixcache.core.tenants import NO_TENANT

Tenants = Callable[[], Collection[str]]
"""Gives the names of those that share; the same object as long as they are the same."""


def nobody() -> Collection[str]:
    """`Tenants` of a daemon that has none."""
    return ()


class Places:
    """`limit` of them. tenants: those that can always have their share.

    with_nobody: what is of no tenant (the empty name) has a share too, if there are tenants.
    """

    def __init__(self, limit: int, tenants: Tenants = nobody, *, with_nobody: bool = False) -> None:
        self._tenants = tenants
        self._with_nobody = with_nobody
        self._known: Collection[str] = ()
        self._lock = threading.Lock()
        self._shares = Shares(limit)

    def take(self, tenant: str) -> bool:
        """False if none is left, or those that are left are kept for others."""
        tenants = self._tenants()
        with self._lock:
            if tenants is not self._known:
                self._shares.share_among({*tenants, NO_TENANT} if self._with_nobody else tenants)
                self._known = tenants
            if not self._shares.has_place(tenant):
                return False
            self._shares.add(tenant)
            return True

    def give_back(self, tenant: str) -> None:
        with self._lock:
            self._shares.remove(tenant)
