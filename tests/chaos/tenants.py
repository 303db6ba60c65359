"""Tenants of a daemon with access control: who they are, and whose blocks each may find.

Two of them share a namespace and so their blocks; one has blocks guaranteed, one may not hold many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prefixcache import Credentials
from tests.support.bearer import hash_of

FILE = "auth.toml"
_ROLES = '["client", "admin"]'


@dataclass(frozen=True, slots=True)
class Tenant:
    """namespace: tenants of the same number find each other's blocks; 0 is nobody's."""

    name: str
    namespace: int
    rules: str

    @property
    def credentials(self) -> Credentials:
        return Credentials(token=self.name)


TENANTS = (
    Tenant("guaranteed", 1, "guaranteed_blocks = 20"),
    Tenant("limited", 2, "max_blocks = 40"),
    Tenant("sharing-a", 3, 'namespace = "shared"'),
    Tenant("sharing-b", 3, 'namespace = "shared"'),
)
"""A tenant's name is its token too."""


def rules_document() -> str:
    """The auth file's text. This user is the operator."""
    entries = [f'uid = {os.getuid()}\ntenant = "ops"\nroles = {_ROLES}']
    entries += [
        f'token_sha256 = "{hash_of(tenant.name)}"\ntenant = "{tenant.name}"\nroles = {_ROLES}'
        for tenant in TENANTS
    ]
    tables = [f"[tenants.{tenant.name}]\n{tenant.rules}" for tenant in TENANTS]
    return "\n".join([*(f"[[identities]]\n{entry}" for entry in entries), *tables])


def access_options(folder: Path) -> tuple[str, str]:
    """Write the auth file; the flag of `serve` that names it."""
    path = folder / FILE
    path.write_text(rules_document(), "utf-8")
    path.chmod(0o600)
    return "--auth", str(path)
