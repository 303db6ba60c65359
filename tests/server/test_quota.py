"""Tenants' quotas from the auth file to the calls of their clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from prefixcache.client import Client, Credentials
from prefixcache.config.network import AccessSection
from prefixcache.core.stats import TenantStats
from prefixcache.errors import InvalidArgumentError, NoRoomError, QuotaExceededError
from prefixcache.options import make_config
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.server.gate import Gate
from prefixcache.server.peer_socket import PeerSocket
from prefixcache.server.rpc_server import RpcServer
from prefixcache.storage.layout import KVLayout
from tests.support.bearer import bearing, hash_of
from tests.support.stubs import Peer, Refused

SIZE = 4
LAYOUT = KVLayout(1, 1, 8, SIZE, "float32")
NUM_BLOCKS = 10
QUOTAS = {"a": "guaranteed_blocks = 4", "b": "max_blocks = 5", "ops": ""}


def auth_text(quotas: dict[str, str]) -> str:
    return "".join(
        f"[[identities]]\ntoken_sha256 = '{hash_of(name)}'\ntenant = '{name}'\n"
        f"roles = {['client', 'admin'] if name == 'ops' else ['client']}\n"
        f"[tenants.{name}]\n{quota}\n"
        for name, quota in quotas.items()
    )


class Served:
    """A daemon with an auth file, which `rewrite` changes and has read again."""

    def __init__(self, folder: Path, model: ModelOptions | None) -> None:
        self.path = folder / "auth.toml"
        self._write(QUOTAS)
        self.daemon = Daemon(CacheOptions(NUM_BLOCKS, SIZE), model)
        self.peers = PeerSocket()
        self.gate = Gate(AccessSection(auth=self.path), self.daemon.sequences, self.peers)
        self.server = RpcServer(self.daemon, max_workers=4, access=self.gate.access)
        self.target = self.server.listen(f"unix:{folder / 'prefixcache.sock'}")
        self.server.start()

    def _write(self, quotas: dict[str, str]) -> None:
        self.path.write_text(auth_text(quotas))
        self.path.chmod(0o600)

    def rewrite(self, quotas: dict[str, str]) -> None:
        self._write(quotas)
        config = {"storage": "none", "num_blocks": NUM_BLOCKS, "auth": self.path}
        self.gate.prepare(make_config(config))()

    def client(self, name: str) -> Client:
        return Client(self.target, credentials=Credentials(token=name), session_ttl_s=None)

    def tenants(self) -> dict[str, TenantStats]:
        with self.client("ops") as client:
            return {tenant.name: tenant for tenant in client.stats().tenants}

    def close(self) -> None:
        self.server.stop(drain_timeout_s=5.0)
        self.peers.close()
        self.daemon.close()


@pytest.fixture(params=["none", "cpu"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    model = ModelOptions(LAYOUT) if request.param == "cpu" else None
    with closing(Served(tmp_path, model)) as served:
        yield served


def tokens(num_blocks: int, first: int = 1) -> list[int]:
    return list(range(first, first + num_blocks * SIZE))


def test_a_guarantee_of_the_auth_file_holds_against_other_tenants(served: Served) -> None:
    with (
        served.client("a") as a,
        served.client("b") as b,
        served.client("ops") as ops,
        ops.sequence(tokens(1)),
        b.sequence(tokens(5, 100)),
    ):
        with pytest.raises(NoRoomError) as refused:
            ops.sequence(tokens(1, 200))
        assert (refused.value.fields["needed"], refused.value.fields["free"]) == ("1", "0")
        assert ops.lookup(tokens(1, 200)).num_blocks_free == 0
        assert a.lookup(tokens(1, 200)).num_blocks_free == 4
        with a.sequence(tokens(4, 300)) as mine:
            assert len(mine.block_ids) == 4


def test_a_limit_of_the_auth_file_is_a_refusal_with_numbers(served: Served) -> None:
    with served.client("b") as b, b.sequence(tokens(3)) as held:
        with pytest.raises(QuotaExceededError) as refused:
            b.sequence(tokens(3, 100))
        assert not refused.value.is_permanent
        numbers = {name: refused.value.fields[name] for name in ("needed", "held", "max")}
        assert numbers == {"needed": "3", "held": "3", "max": "5"}
        with pytest.raises(QuotaExceededError) as refused:
            b.sequence(tokens(6, 100))
        assert refused.value.is_permanent
        with pytest.raises(QuotaExceededError):
            held.append(tokens(3, 100))
        found = b.lookup(tokens(3, 100))
        assert (found.num_blocks_needed, found.num_blocks_free) == (3, 2)
    assert served.tenants()["b"].refused == 3


def test_only_a_quota_that_can_be_kept_later_asks_for_a_retry(served: Served) -> None:
    with bearing(served.target, "b") as stubs:
        peer = Peer(stubs)
        peer.allocate(tokens(3))
        for num_blocks, retries in ((3, True), (6, False)):
            with pytest.raises(Refused) as refused:
                peer.allocate(tokens(num_blocks, 100))
            assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.value.reason == "QUOTA_EXCEEDED"
            assert (refused.value.retry_delay_s is not None) is retries


def test_stats_tell_what_each_tenant_has(served: Served) -> None:
    with served.client("b") as b, b.sequence(tokens(3)):
        assert served.tenants() == {
            "a": TenantStats("a", "a", 4, None, 0, 0, 0, 0),
            "b": TenantStats("b", "b", 0, 5, 3, 0, 0, 0),
            "ops": TenantStats("ops", "ops", 0, None, 0, 0, 0, 0),
        }


def test_quotas_change_with_the_file_while_the_daemon_serves(served: Served) -> None:
    with served.client("b") as b, b.sequence(tokens(2)):
        served.rewrite({"b": "guaranteed_blocks = 9\nmax_blocks = 9", "ops": "", "new": ""})
        with b.sequence(tokens(7, 100)), served.client("new") as new:
            assert new.lookup([1]).num_blocks_free == 1
            new.sequence([1]).free()
        tenants = served.tenants()
    assert (tenants["a"].guaranteed_blocks, tenants["b"].guaranteed_blocks) == (0, 9)


def test_a_file_that_promises_more_than_the_pool_has_changes_nothing(served: Served) -> None:
    before = served.tenants()
    with pytest.raises(InvalidArgumentError, match="guarantee 11 blocks together") as refused:
        served.rewrite({"a": "guaranteed_blocks = 8", "b": "guaranteed_blocks = 3", "ops": ""})
    assert refused.value.field == "--auth"
    assert served.tenants() == before
