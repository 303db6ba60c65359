"""The file of `--auth`: which credentials are whose, and what tenants there are.

Owns its form, its checks and what it means; a file with any mistake in it is refused as a whole.
Pure but for `read_auth_file`. The file holds no secrets, but decides who may do what:

    [[identities]]          one of token_sha256, subject, uid, gid; tenant; roles; expires; attach
    [tenants.NAME]          namespace, guaranteed_blocks, max_blocks; may be left out
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from prefixcache.core.tenants import TenantQuota
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.callers import ADMIN, Caller
from prefixcache.sizes import MAX_BLOCKS
from prefixcache.types import PoolAccess

MAX_BYTES = 16 * 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_SELECTORS = ("token_sha256", "subject", "uid", "gid")
_OVERFLOW_ID = 65534
"""What the kernel shows of users that a container's user namespace does not know: all of them."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller that a credential stands for. expires_at_s: seconds since 1970; None: never."""

    caller: Caller
    expires_at_s: float | None


@dataclass(frozen=True, slots=True)
class AuthRules:
    """A file that was checked.

    by_token: the SHA-256 of a token. by_subject: a certificate's subject, or `dns:NAME` or
    `uri:URI` for a subject alternative name. by_gid: in the order of the file.
    tenants: by name, every one that an identity has. tenants_with_admins: names of those that have
    one with the role admin.
    """

    by_token: Mapping[bytes, Identity]
    by_subject: Mapping[str, Identity]
    by_uid: Mapping[int, Identity]
    by_gid: Mapping[int, Identity]
    tenants: Mapping[str, TenantQuota]
    tenants_with_admins: frozenset[str]

    def of_user(self, uid: int, gids: Collection[int]) -> Identity | None:
        """A user of this host goes before its groups."""
        by_uid = self.by_uid.get(uid)
        if by_uid is not None:
            return by_uid
        return next((who for gid, who in self.by_gid.items() if gid in gids), None)


def token_hash(token: str) -> bytes:
    """What `token_sha256` holds of a token, in hex."""
    return hashlib.sha256(token.encode()).digest()


def check_name(text: str) -> str:
    """The name of a tenant or a namespace. Raises ValueError."""
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 63 letters, digits, '.', '_' or '-', no sign at the start")
    return text


def _sha256_hex(text: str) -> str:
    if not _SHA256_HEX.fullmatch(text):
        raise ValueError("must be 64 lower-case hexadecimal digits")
    return text


def _user_id(number: int) -> int:
    if number == _OVERFLOW_ID:
        raise ValueError(f"{number} stands for every user that the kernel cannot name here")
    return number


def _with_zone(moment: datetime.datetime) -> datetime.datetime:
    if moment.tzinfo is None:
        raise ValueError("needs a time zone, for instance 2027-01-01T00:00:00Z")
    return moment


_Name = Annotated[str, AfterValidator(check_name)]
_UserId = Annotated[int, Field(ge=0, lt=2**32 - 1), AfterValidator(_user_id)]
_Blocks = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class _IdentityEntry(_Entry):
    token_sha256: Annotated[str, AfterValidator(_sha256_hex)] | None = None
    subject: Annotated[str, Field(min_length=1)] | None = None
    uid: _UserId | None = None
    gid: _UserId | None = None
    tenant: _Name
    roles: Annotated[list[Literal["client", "admin"]], Field(min_length=1)] = ["client"]
    expires: Annotated[datetime.datetime, AfterValidator(_with_zone)] | None = None
    attach: Literal["none", "read", "write"] | None = None

    @property
    def selector(self) -> tuple[str, str | int]:
        """The one thing that it is recognised by. Raises ValueError."""
        given = [key for key in _SELECTORS if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"must have one of {', '.join(_SELECTORS)}, has {len(given)}")
        return given[0], getattr(self, given[0])


class _TenantEntry(_Entry):
    namespace: _Name | None = None
    guaranteed_blocks: _Blocks = 0
    max_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] | None = None


class _File(_Entry):
    identities: list[_IdentityEntry] = []
    tenants: dict[_Name, _TenantEntry] = {}


def read_auth_file(path: Path) -> AuthRules:
    """Read a file and check it whole. Raises InvalidArgumentError, which names the entry."""
    try:
        text = read_private_file(path, MAX_BYTES)
        return parse_auth_rules(tomllib.loads(text.decode()))
    except OSError as error:
        raise InvalidArgumentError("--auth", f"{path}: {error.strerror}") from None
    except ValueError as error:  # also of tomllib and of the decoder
        raise InvalidArgumentError("--auth", f"{path}: {error}") from None


def read_private_file(path: Path, max_bytes: int = 2**20) -> bytes:
    """A file that nobody but its owner and group can read or write.

    Raises OSError, or ValueError that says what is wrong with it.
    """
    # A pipe would wait for somebody to write to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("is not a file")
        if mode & stat.S_IRWXO:
            raise ValueError(
                f"every user of this host can get at it (mode {stat.S_IMODE(mode):04o}); "
                "chmod o-rwx"
            )
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"is larger than {max_bytes} bytes")
    return data


def parse_auth_rules(document: Mapping[str, object]) -> AuthRules:
    """The rules in a TOML document. Raises ValueError, which names the entry."""
    try:
        file = _File.model_validate(document)
    except ValidationError as invalid:
        detail = invalid.errors()[0]
        problem = str(detail["msg"]).removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            problem = "is no key here"
        raise ValueError(f"{_place(detail['loc'])}: {problem}") from None
    names = {entry.tenant for entry in file.identities}
    _check_tenants(file.tenants, names)
    tenants = {name: _quota(name, file.tenants.get(name)) for name in sorted(names)}
    found: dict[str, dict[str | int, Identity]] = {key: {} for key in _SELECTORS}
    for index, entry in enumerate(file.identities):
        try:
            kind, value = entry.selector
        except ValueError as error:
            raise ValueError(f"identities[{index}]: {error}") from None
        if value in found[kind]:
            raise ValueError(f"identities[{index}].{kind}: an entry before has the same")
        found[kind][value] = _identity(entry, tenants)
    return AuthRules(
        by_token={bytes.fromhex(str(key)): who for key, who in found["token_sha256"].items()},
        by_subject={str(key): who for key, who in found["subject"].items()},
        by_uid={int(key): who for key, who in found["uid"].items()},
        by_gid={int(key): who for key, who in found["gid"].items()},
        tenants=tenants,
        tenants_with_admins=frozenset(
            entry.tenant for entry in file.identities if ADMIN in entry.roles
        ),
    )


def _check_tenants(tenants: Mapping[str, _TenantEntry], names: set[str]) -> None:
    for name, entry in tenants.items():
        if name not in names:
            raise ValueError(f"tenants.{name}: no identity has this tenant")
        namespace = entry.namespace or name
        own = tenants.get(namespace)
        # Who shares says so: nobody is joined by others without a word of its own.
        if namespace != name and namespace in names and (own is None or own.namespace is None):
            raise ValueError(
                f"tenants.{name}.namespace: {namespace!r} is a tenant's own; for sharing, give "
                "that tenant the namespace too"
            )
        if entry.max_blocks is not None and entry.max_blocks < entry.guaranteed_blocks:
            raise ValueError(f"tenants.{name}.max_blocks: is less than guaranteed_blocks")


def _quota(name: str, entry: _TenantEntry | None) -> TenantQuota:
    if entry is None:
        return TenantQuota(name, name)
    return TenantQuota(name, entry.namespace or name, entry.guaranteed_blocks, entry.max_blocks)


def _identity(entry: _IdentityEntry, tenants: Mapping[str, TenantQuota]) -> Identity:
    pool_access = PoolAccess.NONE
    if entry.attach is not None:
        pool_access = PoolAccess[entry.attach.upper()]
    elif len(tenants) == 1:
        # The memory holds the K/V of all tenants: with more than one, it is granted or refused.
        pool_access = PoolAccess.WRITE
    namespace = tenants[entry.tenant].namespace
    caller = Caller(entry.tenant, namespace, frozenset(entry.roles), pool_access)
    return Identity(caller, entry.expires.timestamp() if entry.expires is not None else None)


def _place(location: tuple[int | str, ...]) -> str:
    """`identities[2].roles[0]`"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
