"""Tenants by name: which account of the pool is whose, and what each has of it.

Owns the names and the refusals; the pool owns the blocks, and `prefixcache.core.accounts` has the
rules. Tenants of one namespace find each other's blocks, which the keys of their hashes must see
to: a chain of hashes is of one namespace. Guarded by the core's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prefixcache.core.accounts import MAX_ACCOUNTS
from prefixcache.core.pool import Pool
from prefixcache.core.stats import TenantStats
from prefixcache.errors import InvalidArgumentError

NO_TENANT = ""
"""The tenant, and the namespace, of everything that has none: account 0."""


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """guaranteed_blocks: which it can always have. max_blocks: which it may hold; None: any."""

    name: str
    namespace: str
    guaranteed_blocks: int = 0
    max_blocks: int | None = None


class Tenants:
    """None at first: then everything is of account 0, and no accounts are kept."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._accounts: dict[tuple[str, str], int] = {(NO_TENANT, NO_TENANT): 0}
        self._groups: dict[str, int] = {NO_TENANT: 0}
        self._refused = Counter[int]()

    def account_of(self, name: str, namespace: str) -> int:
        """The account of a tenant that is there, or was. Needs no lock.

        Raises KeyError for one that never was, once there are any.
        """
        return self._accounts[name, namespace] if self._pool.keeps_accounts else 0

    def name_of(self, account: int) -> str:
        """The tenant whose account it is."""
        return next(name for (name, _), own in self._accounts.items() if own == account)

    def count_refusal(self, account: int) -> None:
        self._refused[account] += 1

    def check(self, quotas: Iterable[TenantQuota]) -> None:
        """Raises InvalidArgumentError if these cannot be the tenants from now on."""
        found: dict[str, TenantQuota] = {}
        for quota in quotas:
            if quota.name in found:
                raise InvalidArgumentError("tenants", f"{quota.name!r} is there twice")
            found[quota.name] = quota
            _check_quota(quota)
        promised = sum(quota.guaranteed_blocks for quota in found.values())
        if promised > self._pool.num_blocks:
            raise InvalidArgumentError(
                "tenants",
                f"guarantee {promised} blocks together, and the pool has {self._pool.num_blocks}",
            )
        keys = {(quota.name, quota.namespace) for quota in found.values()}
        if len(keys | self._accounts.keys()) > MAX_ACCOUNTS:
            raise InvalidArgumentError(
                "tenants", f"are more than {MAX_ACCOUNTS}, those since the start included"
            )

    def apply(self, quotas: Iterable[TenantQuota]) -> None:
        """These are the tenants from now on. Raises InvalidArgumentError, and changes nothing.

        One that is gone keeps its blocks, with nothing guaranteed and without a limit. One that
        changes its namespace is another tenant, which has none of the blocks it had.
        """
        wanted = list(quotas)
        self.check(wanted)
        by_key = {(quota.name, quota.namespace): quota for quota in wanted}
        # What goes down goes first, so that the sum of guarantees is never above the pool.
        for key, account in self._accounts.items():
            use = self._pool.account(account)
            kept = by_key[key].guaranteed_blocks if key in by_key else 0
            self._pool.set_account(account, use.group, min(use.guaranteed, kept), None)
        for key, quota in by_key.items():
            group = self._groups.setdefault(quota.namespace, len(self._groups))
            account = self._accounts.setdefault(key, len(self._accounts))
            self._pool.set_account(account, group, quota.guaranteed_blocks, quota.max_blocks)

    def stats(self) -> tuple[TenantStats, ...]:
        """Every tenant, gone ones included, oldest first; what has no tenant if it has blocks."""
        if len(self._accounts) == 1:
            return ()
        found = []
        for (name, namespace), account in self._accounts.items():
            use = self._pool.account(account)
            one = TenantStats(
                name=name,
                namespace=namespace,
                guaranteed_blocks=use.guaranteed,
                max_blocks=use.max_blocks,
                held=use.held,
                evictable=use.evictable,
                evictions=use.evictions,
                refused=self._refused[account],
            )
            if account or one.held or one.evictable:
                found.append(one)
        return tuple(found)


def _check_quota(quota: TenantQuota) -> None:
    if quota.guaranteed_blocks < 0:
        raise InvalidArgumentError(
            "guaranteed_blocks",
            f"of {quota.name!r} is {quota.guaranteed_blocks}, must be 0 or more",
        )
    if quota.max_blocks is not None and quota.max_blocks < max(1, quota.guaranteed_blocks):
        raise InvalidArgumentError(
            "max_blocks",
            f"of {quota.name!r} is {quota.max_blocks}, must be at least 1 and at least its "
            f"guaranteed_blocks ({quota.guaranteed_blocks})",
        )
