"""One user or host cannot keep all connections of an address, and keeps those it had first."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from prefixcache.config.network import LimitSection
from prefixcache.server.crowded_addresses import CrowdedAddresses
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.server.rpc_server import RpcServer
from tests.support.daemon import running_daemon
from tests.support.stubs import connected
from tests.support.waiting import WAIT_S, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Connection:
    """One that gRPC has taken; says no more."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(WAIT_S)
        self._socket.sendall(PREFACE)
        assert self._socket.recv(9)

    def is_cut(self) -> bool:
        self._socket.setblocking(False)
        try:
            while self._socket.recv(1024):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()


@contextmanager
def to_socket(path: str) -> Iterator[Connection]:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        yield Connection(connected)


@contextmanager
def to_port(port: int, own_host: str) -> Iterator[Connection]:
    with socket.create_connection(("127.0.0.1", port), WAIT_S, (own_host, 0)) as connected:
        yield Connection(connected)


def test_the_newest_connections_of_a_user_are_cut() -> None:
    with (
        running_daemon(CacheOptions(16, 4), max_connections_per_peer=3) as running,
        connected(running.target) as stubs,
        ExitStack() as opened,
    ):
        path = running.target.removeprefix("unix:")
        assert stubs.lookup([1]).num_cached_tokens == 0
        kept = [opened.enter_context(to_socket(path)) for _ in range(2)]
        running.sweep()
        assert not any(connection.is_cut() for connection in kept)
        for _ in range(3):
            new = [opened.enter_context(to_socket(path)) for _ in range(2)]
            running.sweep()
            until(lambda new=new: all(connection.is_cut() for connection in new))
            assert not any(connection.is_cut() for connection in kept)
        assert stubs.lookup([1]).num_cached_tokens == 0
        kept.pop().close()
        until(lambda: _keeps_another(running.sweep, path))


def _keeps_another(sweep: object, path: str) -> bool:
    """As soon as the daemon knows that one has gone."""
    with to_socket(path) as another:
        sweep()  # type: ignore[operator]
        return not another.is_cut()


def test_hosts_have_their_own_parts_of_a_port() -> None:
    daemon = Daemon(CacheOptions(16, 4))
    server = RpcServer(daemon, max_workers=2, max_connections_per_peer=2)
    port = int(server.listen("127.0.0.1:0").rpartition(":")[2])
    server.start()
    with ExitStack() as opened:
        opened.callback(server.stop, 5.0)
        hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.3"]
        kept = [opened.enter_context(to_port(port, host)) for host in hosts]
        server.cut_stale_streams()
        new = opened.enter_context(to_port(port, "127.0.0.3"))
        server.cut_stale_streams()
        until(new.is_cut)
        assert not any(connection.is_cut() for connection in kept)


def test_without_a_descriptor_left_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the thread that ends sessions, which has to go on."""

    def no_descriptor(path: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "listdir", no_descriptor)
    CrowdedAddresses(1).cut()


@pytest.mark.parametrize(
    ("flags", "of_a_peer"),
    [
        ({}, 768),
        ({"max_connections": 1}, 1),
        ({"max_connections": 3}, 3),
        ({"max_connections": 4}, 3),
        ({"max_connections": 4, "max_per_peer": 4}, 4),
    ],
)
def test_a_peer_has_three_quarters_of_an_address(flags: dict[str, int], of_a_peer: int) -> None:
    assert LimitSection(**flags).connections_of_a_peer == of_a_peer
