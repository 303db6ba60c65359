"""TLS of TCP ports with real certificates: who is let in, renewed files, files that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.server.rpc_server import RpcServer
from prefixcache.server.tls import ServerTls, TlsFiles
from tests.support.bearer import hash_of
from tests.support.certificates import Authority, Pair
from tests.support.stubs import TIMEOUT_S

PATH = "/prefixcache.v1.PrefixCacheService/GetServerInfo"
BEARER = [("authorization", "Bearer of a client")]
UNAVAILABLE, UNAUTHENTICATED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED

Serve = Callable[..., str]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server_pair(authority: Authority) -> Pair:
    return authority.issue("server", "ip:127.0.0.1")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a daemon with these identities on a port with TLS; returns its address."""
    with ExitStack() as resources:

        def start(tls: ServerTls, *identities: dict[str, object]) -> str:
            rules = parse_auth_rules({"identities": list(identities)})
            access = AccessControl(rules, PeerTickets())
            daemon = Daemon(CacheOptions(16, 4))
            server = RpcServer(daemon, max_workers=2, access=access)
            address = server.listen("127.0.0.1:0", tls.credentials())
            server.start()
            resources.callback(server.stop, 5.0)
            return address

        yield start


@contextmanager
def opened(address: str, ca: Path, pair: Pair | None = None) -> Iterator[grpc.Channel]:
    credentials = grpc.ssl_channel_credentials(
        ca.read_bytes(),
        pair.key.read_bytes() if pair else None,
        pair.cert.read_bytes() if pair else None,
    )
    # Else gRPC would use an open connection of another channel again.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(address, credentials, options) as channel:
        yield channel


def outcome(
    address: str,
    ca: Path,
    pair: Pair | None = None,
    metadata: list[tuple[str, str]] | None = None,
) -> grpc.StatusCode:
    with opened(address, ca, pair) as channel:
        try:
            channel.unary_unary(PATH)(b"", metadata=metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def client(**selector: str) -> dict[str, object]:
    return {**selector, "tenant": "team"}


TOKEN = client(token_sha256=hash_of("of a client"))


def test_a_token_over_tls_without_a_client_certificate(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    address = serve(ServerTls(TlsFiles(server_pair.cert, server_pair.key)), TOKEN)
    assert outcome(address, authority.ca, metadata=BEARER) is grpc.StatusCode.OK
    assert outcome(address, authority.ca) is UNAUTHENTICATED
    stranger = Authority(tmp_path, "stranger")
    assert outcome(address, stranger.ca, metadata=BEARER) is UNAVAILABLE
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(PATH)(b"", metadata=BEARER, timeout=TIMEOUT_S)
    assert refused.value.code() is UNAVAILABLE


@pytest.mark.parametrize("name", ["dns:engine.local", "uri:spiffe://local/engine"])
def test_a_certificate_is_known_by_its_alternative_names(
    serve: Serve, authority: Authority, server_pair: Pair, name: str
) -> None:
    pair = authority.issue("engine", name)
    other = authority.issue("other", "dns:other.local")
    tls = ServerTls(TlsFiles(server_pair.cert, server_pair.key, authority.ca))
    address = serve(tls, client(subject=name), TOKEN)
    assert outcome(address, authority.ca, pair) is grpc.StatusCode.OK
    assert outcome(address, authority.ca, other) is UNAUTHENTICATED
    assert outcome(address, authority.ca, other, BEARER) is grpc.StatusCode.OK
    assert outcome(address, authority.ca, None, BEARER) is UNAVAILABLE


def test_a_certificate_is_known_by_its_subject(
    serve: Serve, authority: Authority, server_pair: Pair
) -> None:
    subject = "CN=engine-7,O=team-b"
    pair = authority.issue("engine", "dns:engine.local", subject=subject)
    tls = ServerTls(TlsFiles(server_pair.cert, server_pair.key, authority.ca))
    address = serve(tls, client(subject=subject))
    assert outcome(address, authority.ca, pair) is grpc.StatusCode.OK
    # A part of it is none.
    address = serve(tls, client(subject="CN=engine-7"))
    assert outcome(address, authority.ca, pair) is UNAUTHENTICATED


def test_a_certificate_of_another_authority_is_not_let_in(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    forged = Authority(tmp_path, "forger").issue("forged", "dns:engine.local")
    tls = ServerTls(TlsFiles(server_pair.cert, server_pair.key, authority.ca))
    address = serve(tls, client(subject="dns:engine.local"))
    assert outcome(address, authority.ca, forged) is UNAVAILABLE


def test_renewed_files_are_for_new_connections(
    serve: Serve, authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    files = TlsFiles(server_pair.cert, server_pair.key)
    tls = ServerTls(files)
    address = serve(tls, TOKEN)
    with opened(address, authority.ca) as channel:
        call = channel.unary_unary(PATH, response_deserializer=_info)
        boot_id = call(b"", metadata=BEARER, timeout=TIMEOUT_S).boot_id
        other = Authority(tmp_path, "other")
        renewed = other.issue("renewed", "ip:127.0.0.1")
        apply = tls.prepare(replace(files, cert=renewed.cert, key=renewed.key))
        assert outcome(address, authority.ca, metadata=BEARER) is grpc.StatusCode.OK
        apply()
        assert outcome(address, other.ca, metadata=BEARER) is grpc.StatusCode.OK
        assert outcome(address, authority.ca, metadata=BEARER) is UNAVAILABLE
        assert call(b"", metadata=BEARER, timeout=TIMEOUT_S).boot_id == boot_id


def test_each_port_gets_a_certificate_once(
    monkeypatch: pytest.MonkeyPatch, server_pair: Pair
) -> None:
    """gRPC frees what it had before, which another handshake may use at that moment."""
    asked = []

    def made(*given: Any, **options: Any) -> grpc.ServerCredentials:
        asked.append(given[1])
        return make(*given, **options)

    make = grpc.dynamic_ssl_server_credentials
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", made)
    files = TlsFiles(server_pair.cert, server_pair.key)
    tls = ServerTls(files)
    for _ in range(2):
        tls.credentials()
    assert [renewed() for renewed in asked] == [None, None]
    tls.prepare(files)()
    first, second = (renewed() for renewed in asked)
    assert first is second is not None
    assert [renewed() for renewed in asked] == [None, None]


def _info(data: bytes) -> cache_pb2.GetServerInfoResponse:
    return cache_pb2.GetServerInfoResponse.FromString(data)


def test_files_that_do_not_fit_are_named(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    def field_of(files: TlsFiles) -> str:
        with pytest.raises(InvalidArgumentError) as refused:
            ServerTls(files)
        return refused.value.field

    good = TlsFiles(server_pair.cert, server_pair.key, authority.ca)
    tls = ServerTls(good)
    other = authority.issue("other", "ip:127.0.0.1")
    text = tmp_path / "text"
    text.touch(0o600)
    text.write_text("no certificate")
    assert field_of(replace(good, key=other.key)) == "--tls-cert"
    assert field_of(replace(good, cert=text)) == "--tls-cert"
    assert field_of(replace(good, key=text)) == "--tls-cert"
    assert field_of(replace(good, client_ca=text)) == "--tls-client-ca"
    assert field_of(replace(good, cert=tmp_path / "none")) == "--tls-cert"
    assert field_of(replace(good, key=tmp_path / "none")) == "--tls-key"
    with pytest.raises(InvalidArgumentError, match="restart"):
        tls.prepare(replace(good, client_ca=None))
    server_pair.key.chmod(0o644)
    assert field_of(good) == "--tls-key"
