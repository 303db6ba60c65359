"""Who makes a call: the tenant, and the roles that say which calls it may make.

Immutable values, and the table of the role that each call needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.core.extra_keys import in_namespace
from prefixcache.core.sessions import owner_key
from prefixcache.errors import PermissionDeniedError
from prefixcache.types import ExtraKeys, PoolAccess

CLIENT = "client"
ADMIN = "admin"
ROLES = (CLIENT, ADMIN)

_FOR_ANY_ROLE = frozenset({"GetServerInfo"})
_FOR_ADMINS = frozenset({"AdminService"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Without access control there is one, of no tenant, who may do anything: `ANYONE`.

    pool_access: what its processes may do with the pool's memory.
    """

    tenant: str
    namespace: str
    roles: frozenset[str]
    pool_access: PoolAccess = PoolAccess.NONE

    def check_may(self, needed_role: str | None) -> None:
        """Raises PermissionDeniedError. None: any role will do."""
        if needed_role is not None and needed_role not in self.roles:
            raise PermissionDeniedError(needed_role)

    def owner_key(self, owner: bytes) -> bytes:
        """What the core knows the owner by that this caller names; see `core.sessions`."""
        return owner_key(self.tenant, owner)

    def own_keys(self, extra_keys: ExtraKeys) -> ExtraKeys:
        """The extra keys of this caller's prompt."""
        return in_namespace(extra_keys, self.namespace)


ANYONE = Caller("", "", frozenset(ROLES), PoolAccess.WRITE)


def needed_role(service: str, method: str) -> str | None:
    """service: its short name. None: every caller that is known may."""
    if method in _FOR_ANY_ROLE:
        return None
    return ADMIN if service in _FOR_ADMINS else CLIENT
