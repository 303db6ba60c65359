"""The file of `--auth`: what it may say, and what is said of one that may not be used."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from prefixcache.core.tenants import TenantQuota
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.auth_file import (
    parse_auth_rules,
    read_auth_file,
    token_hash,
)
from prefixcache.server.callers import Caller
from prefixcache.types import PoolAccess

HASH = "0123456789abcdef" * 4
CLIENT = frozenset({"client"})
ONE = f'[[identities]]\ntoken_sha256 = "{HASH}"\ntenant = "a"\n'


def problem_of(text: str) -> str:
    with pytest.raises(ValueError) as refused:
        parse_auth_rules(tomllib.loads(text))
    return str(refused.value)


def test_every_kind_of_identity_is_read() -> None:
    rules = parse_auth_rules(
        tomllib.loads(
            ONE
            + """
            expires = 2027-01-01T00:00:00Z
            [[identities]]
            subject = "CN=engine-7,O=team-b"
            tenant = "b"
            roles = ["client", "admin"]
            [[identities]]
            uid = 0
            tenant = "a"
            [[identities]]
            gid = 1001
            tenant = "c"
            roles = ["admin"]
            [tenants.a]
            namespace = "shared"
            guaranteed_blocks = 10
            [tenants.b]
            namespace = "shared"
            max_blocks = 50
            """
        )
    )
    token = rules.by_token[bytes.fromhex(HASH)]
    assert token.caller == Caller("a", "shared", CLIENT)
    assert token.expires_at_s == 1798761600.0
    subject = rules.by_subject["CN=engine-7,O=team-b"]
    assert subject.caller == Caller("b", "shared", frozenset({"client", "admin"}))
    assert subject.expires_at_s is None
    assert rules.by_uid[0].caller == token.caller
    assert rules.by_gid[1001].caller == Caller("c", "c", frozenset({"admin"}))
    assert rules.tenants == {
        "a": TenantQuota("a", "shared", 10, None),
        "b": TenantQuota("b", "shared", 0, 50),
        "c": TenantQuota("c", "c", 0, None),
    }


def test_the_memory_is_the_only_tenants_and_with_more_whose_it_is_granted() -> None:
    def granted(text: str) -> list[PoolAccess]:
        rules = parse_auth_rules(tomllib.loads(text))
        return [
            who.caller.pool_access for who in (*rules.by_token.values(), *rules.by_uid.values())
        ]

    other = '[[identities]]\nuid = 7\ntenant = "b"\n'
    assert granted(ONE) == [PoolAccess.WRITE]
    assert granted(ONE + 'attach = "none"') == [PoolAccess.NONE]
    assert granted(ONE + other) == [PoolAccess.NONE, PoolAccess.NONE]
    assert granted(ONE + 'attach = "read"\n' + other) == [PoolAccess.READ, PoolAccess.NONE]
    assert granted(ONE + other + 'attach = "write"') == [PoolAccess.NONE, PoolAccess.WRITE]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ONE + 'attach = "all"', "identities[0].attach: Input should be 'none', 'read' or 'write'"),
        ("identity = 1", "identity: is no key here"),
        (ONE + 'tennant = "a"', "identities[0].tennant: is no key here"),
        ("[[identities]]\nuid = 1", "identities[0].tenant: Field required"),
        (ONE + '[[identities]]\nuid = "1"\ntenant = "a"', "identities[1].uid: "),
        (ONE + "[[identities]]\nuid = true\ntenant = 'a'", "identities[1].uid: "),
        (ONE + "[[identities]]\nuid = -1\ntenant = 'a'", "identities[1].uid: "),
        (ONE + "[[identities]]\nuid = 65534\ntenant = 'a'", "identities[1].uid: 65534 stands"),
        (ONE + "[[identities]]\ntenant = 'a'", "identities[1]: must have one of token_sha256"),
        (ONE + "uid = 3", "identities[0]: must have one of token_sha256, subject, uid, gid, has 2"),
        (ONE + ONE, "identities[1].token_sha256: an entry before has the same"),
        (ONE.replace(HASH, HASH.upper()), "identities[0].token_sha256: must be 64 lower-case"),
        (ONE.replace(HASH, HASH[1:]), "identities[0].token_sha256: must be 64 lower-case"),
        (ONE.replace('"a"', '"a b"'), "identities[0].tenant: must be 1 to 63"),
        (ONE.replace('"a"', '""'), "identities[0].tenant: must be 1 to 63"),
        (ONE + 'roles = ["root"]', "identities[0].roles[0]: "),
        (ONE + "roles = []", "identities[0].roles: "),
        (ONE + "expires = 2027-01-01T00:00:00", "identities[0].expires: needs a time zone"),
        (ONE + "expires = 2027-01-01", "identities[0].expires: "),
        (ONE + "[tenants.b]\nmax_blocks = 3", "tenants.b: no identity has this tenant"),
        (ONE + "[tenants.a]\nmax_blocks = 0", "tenants.a.max_blocks: "),
        (ONE + "[tenants.a]\nmax_blocks = 2.0", "tenants.a.max_blocks: "),
        (ONE + "[tenants.a]\nquota = 2", "tenants.a.quota: is no key here"),
        (
            ONE + "[tenants.a]\nmax_blocks = 2\nguaranteed_blocks = 3",
            "tenants.a.max_blocks: is less than guaranteed_blocks",
        ),
    ],
)
def test_a_mistake_is_named_with_its_entry(text: str, problem: str) -> None:
    assert problem_of(text).startswith(problem)


def test_nobody_joins_a_tenant_that_does_not_say_so() -> None:
    two = ONE + '[[identities]]\nuid = 1\ntenant = "b"\n[tenants.b]\nnamespace = "a"\n'
    assert problem_of(two).startswith("tenants.b.namespace: 'a' is a tenant's own")
    parse_auth_rules(tomllib.loads(two + '[tenants.a]\nnamespace = "a"\n'))


def test_an_empty_file_admits_nobody() -> None:
    rules = parse_auth_rules({})
    assert not (rules.by_token or rules.by_subject or rules.by_uid or rules.by_gid)


def test_a_token_is_known_by_its_sha256() -> None:
    assert token_hash("abc").hex().startswith("ba7816bf8f01cfea")  # FIPS 180-2, B.1


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666, 0o641])
def test_a_file_that_others_can_get_at_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    path.write_text(ONE)
    path.chmod(mode)
    with pytest.raises(InvalidArgumentError, match="chmod o-rwx") as refused:
        read_auth_file(path)
    assert refused.value.field == "--auth"
    path.chmod(0o640)
    assert read_auth_file(path).tenants


def test_what_is_no_readable_toml_file_is_refused(tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(InvalidArgumentError) as refused:
            read_auth_file(path)
        assert str(path) in str(refused.value)
        return str(refused.value)

    assert "No such file" in problem(tmp_path / "none")
    assert "Is a directory" in problem(tmp_path)
    assert "is not a file" in problem(Path("/dev/null"))
    path = tmp_path / "auth.toml"
    path.touch(0o600)
    path.write_bytes(b"\xff")
    assert "decode" in problem(path)
    path.write_text("identities = [")
    problem(path)
