"""What clients show a daemon: tokens, certificates, tickets; and what they never show anybody."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache import Credentials, TlsCredentials
from prefixcache.client import channel_options
from prefixcache.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    SessionLostError,
    UnauthenticatedError,
)
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.server.peer_socket import PeerSocket, peer_socket_path
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.server.rpc_server import RpcServer
from prefixcache.server.tls import ServerTls, TlsFiles
from tests.client.twins import once_it_is_back, open_client
from tests.support.bearer import hash_of
from tests.support.certificates import Authority, Pair
from tests.support.waiting import until

TOKEN = {"token_sha256": hash_of("my-token"), "tenant": "team", "roles": ["client", "admin"]}
THIS_USER = {"uid": os.geteuid(), "tenant": "mine"}
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


class Guarded:
    """A daemon with these identities; may be stopped and started again on the same socket."""

    def __init__(self, folder: Path, *identities: dict[str, Any], tls: ServerTls | None = None):
        self.path = folder / "sock"
        self.target = f"unix:{self.path}"
        self._rules = parse_auth_rules({"identities": list(identities)})
        self._tls = tls
        self.start()

    def start(self) -> None:
        self._tickets = PeerTickets()
        self.peers = PeerSocket()
        self.peers.answer(PeerMessage.TICKET, self._tickets.give)
        self.peers.listen(peer_socket_path(self.path))
        self.peers.start()
        self.access = AccessControl(self._rules, self._tickets)
        self.daemon = Daemon(CacheOptions(64, 4))
        self._server = RpcServer(self.daemon, max_workers=8, access=self.access)
        self._server.listen(self.target)
        credentials = self._tls.credentials() if self._tls else None
        self.tcp_target = self._server.listen("127.0.0.1:0", credentials)
        self._server.start()

    def close(self) -> None:
        self._server.stop(5.0)
        self.peers.close()
        peer_socket_path(self.path).unlink()

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)


Guard = Callable[..., Guarded]


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    with ExitStack() as running:
        yield lambda *identities, **options: running.enter_context(
            closing(Guarded(tmp_path, *identities, **options))
        )


def use(client: Any) -> None:
    """Every way a client speaks: calls, the keeper's stream, steps."""
    with client.sequence(range(1, 10)) as sequence:
        sequence.commit(9 - sequence.num_cached_tokens)
        with client.steps() as steps:
            step = steps.new_step()
            appended = step.append([sequence], [[5]])
            steps.run(step)
            assert len(appended.result()) == 1
    assert client.lookup(range(1, 10)).num_cached_tokens == 8


@KINDS
def test_a_token_is_sent_with_every_call(guard: Guard, kind: str) -> None:
    guarded = guard(TOKEN)
    for target in (guarded.target, guarded.tcp_target):
        with open_client(kind, target, credentials=Credentials("my-token")) as client:
            use(client)
            (session,) = client.list_sessions()
            assert (session.tenant, session.is_connected) == ("team", True)
    assert guarded.num_tickets == 0


@KINDS
def test_a_wrong_token_is_refused_and_no_ticket_stands_in_for_it(guard: Guard, kind: str) -> None:
    guarded = guard(THIS_USER)
    with open_client(kind, guarded.target, credentials=Credentials("wrong")) as client:
        with pytest.raises(UnauthenticatedError):
            client.lookup([1])
        assert guarded.num_tickets == 0


@KINDS
def test_a_channel_of_the_callers_carries_the_token(guard: Guard, kind: str) -> None:
    target = guard(TOKEN).tcp_target
    if kind == "async":
        import asyncio

        from prefixcache import AsyncClient

        async def main() -> None:
            async with grpc.aio.insecure_channel(target, channel_options()) as channel:
                shown = Credentials("my-token")
                async with AsyncClient(channel=channel, credentials=shown) as client:
                    assert await client.lookup([1])

        asyncio.run(main())
        return
    with (
        grpc.insecure_channel(target, channel_options()) as channel,
        open_client(kind, channel=channel, credentials=Credentials("my-token")) as client,
    ):
        assert client.lookup([1])


@KINDS
def test_on_a_unix_socket_this_user_is_enough(guard: Guard, kind: str) -> None:
    guarded = guard(THIS_USER)
    with open_client(kind, guarded.target) as client:
        use(client)
        with pytest.raises(PermissionDeniedError):
            client.stats()
        assert guarded.num_tickets == 1
    until(lambda: guarded.num_tickets == 0)


@KINDS
def test_another_user_is_refused(guard: Guard, kind: str) -> None:
    guarded = guard({"uid": os.geteuid() + 1, "tenant": "other"}, {"gid": 54321, "tenant": "o"})
    with open_client(kind, guarded.target) as client:
        for _ in range(3):
            with pytest.raises(UnauthenticatedError):
                client.lookup([1])
        assert guarded.num_tickets <= 1


@KINDS
def test_the_group_of_this_user_is_enough(guard: Guard, kind: str) -> None:
    with open_client(kind, guard({"gid": os.getegid(), "tenant": "group"}).target) as client:
        use(client)


@KINDS
def test_over_tcp_a_client_without_credentials_is_refused(guard: Guard, kind: str) -> None:
    target = guard(THIS_USER).tcp_target
    with open_client(kind, target) as client, pytest.raises(UnauthenticatedError):
        client.server_info()


@KINDS
def test_after_a_restart_a_client_gets_a_new_ticket(guard: Guard, kind: str) -> None:
    guarded = guard(THIS_USER)
    with open_client(kind, guarded.target) as client:
        sequence = client.sequence([1, 2, 3])
        guarded.close()
        guarded.start()
        with pytest.raises(SessionLostError):
            once_it_is_back(lambda: sequence.append([4]))
        use(client)
        assert guarded.num_tickets == 1


def test_many_threads_that_are_refused_at_once_share_one_ticket(guard: Guard) -> None:
    guarded = guard(THIS_USER)
    failures: list[BaseException] = []
    with open_client("sync", guarded.target) as client:
        together = threading.Barrier(8)

        def call() -> None:
            try:
                together.wait()
                client.lookup([1])
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert guarded.num_tickets == 1


@KINDS
@pytest.mark.parametrize(
    "answer", [b"", b"\x00\x00\x00\x00", b"\xff" * 8, b"\x00\x00\x00\x02\x00x"]
)
def test_a_peer_socket_that_answers_nonsense_gives_no_ticket(
    guard: Guard, kind: str, answer: bytes
) -> None:
    guarded = guard(THIS_USER)
    guarded.peers.close()
    path = peer_socket_path(guarded.path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(64)
                accepted.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with open_client(kind, guarded.target) as client, pytest.raises(UnauthenticatedError):
            client.lookup([1])
        thread.join()


# ---- TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server_pair(authority: Authority) -> Pair:
    return authority.issue("server", "ip:127.0.0.1")


def tls_of(authority: Authority, pair: Pair | None = None) -> TlsCredentials:
    tls = TlsCredentials(authority.ca.read_bytes())
    if pair is None:
        return tls
    return replace(tls, cert=pair.cert.read_bytes(), key=pair.key.read_bytes())


@KINDS
def test_a_token_over_tls(guard: Guard, kind: str, authority: Authority, server_pair: Pair) -> None:
    guarded = guard(TOKEN, tls=ServerTls(TlsFiles(server_pair.cert, server_pair.key)))
    shown = Credentials("my-token", tls_of(authority))
    with open_client(kind, guarded.tcp_target, credentials=shown) as client:
        use(client)


@KINDS
def test_a_certificate_in_place_of_a_token(
    guard: Guard, kind: str, authority: Authority, server_pair: Pair
) -> None:
    pair = authority.issue("engine", "uri:spiffe://local/engine")
    guarded = guard(
        {"subject": "uri:spiffe://local/engine", "tenant": "engines"},
        tls=ServerTls(TlsFiles(server_pair.cert, server_pair.key, authority.ca)),
    )
    shown = Credentials(tls=tls_of(authority, pair))
    with open_client(kind, guarded.tcp_target, credentials=shown) as client:
        use(client)


# ---- what is refused before anything is sent


@KINDS
@pytest.mark.parametrize("target", ["gpu-1:50051", "10.0.0.1:1", "0.0.0.0:1"])
def test_a_token_goes_to_no_other_machine_in_the_clear(kind: str, target: str) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="in the clear"),
        open_client(kind, target, credentials=Credentials("my-token")),
    ):
        pass
    shown = Credentials("my-token", TlsCredentials())
    with open_client(kind, target, credentials=shown):
        pass


@KINDS
def test_tls_is_for_tcp(kind: str) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="Unix socket"),
        open_client(kind, "unix:sock", credentials=Credentials(tls=TlsCredentials())),
    ):
        pass


@pytest.mark.parametrize("token", ["", "a b", "a\n", "ä", "\0"])
def test_a_token_is_printable_text(token: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Credentials(token)
    assert refused.value.field == "token"


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(InvalidArgumentError):
        TlsCredentials(cert=b"c")
    with pytest.raises(InvalidArgumentError):
        TlsCredentials(key=b"k")


def test_secrets_show_nowhere() -> None:
    shown = Credentials("my-token", TlsCredentials(b"ca", b"cert", b"my-key"))
    assert "my-token" not in repr(shown)
    assert "my-key" not in repr(shown)
    with pytest.raises(InvalidArgumentError) as refused:
        Credentials("my token")
    assert "my token" not in str(refused.value)
