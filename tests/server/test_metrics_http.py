"""The HTTP of the metrics: its pages, and peers that are slow, many or speak nonsense."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from prefixcache.address import TcpAddress, UnixAddress
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.metrics_http import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    REQUEST_TIMEOUT_S,
    MetricsServer,
)
from tests.support.waiting import WAIT_S

LOOPBACK = TcpAddress("127.0.0.1", 0)
# As Prometheus sends it.
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5"


class Cups:
    """One counter with `num_labels` samples, and a help text."""

    def __init__(self, num_labels: int, text: str = "Of tea.") -> None:
        self._num_labels = num_labels
        self._text = text

    def collect(self) -> Iterator[Metric]:
        cups = CounterMetricFamily("cups", self._text, labels=("kind",))
        for number in range(self._num_labels):
            cups.add_metric((f"kind {number}",), number)
        yield cups


class Broken:
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        raise ValueError("broken on purpose")


@dataclass
class Served:
    address: TcpAddress
    is_ready: bool = False

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), WAIT_S)

    def get(self, path: str, **headers: str) -> HTTPResponse:
        return self.request("GET", path, **headers)

    def request(self, method: str, path: str, **headers: str) -> HTTPResponse:
        connection = HTTPConnection(self.address.host, self.address.port, WAIT_S)
        connection.request(method, path, headers=headers)
        return connection.getresponse()


@contextmanager
def serving(*collectors: object, request_timeout_s: float = REQUEST_TIMEOUT_S) -> Iterator[Served]:
    registry = CollectorRegistry(auto_describe=True)
    for collector in collectors:
        registry.register(collector)
    served = Served(LOOPBACK)
    server = MetricsServer(
        LOOPBACK, registry, lambda: served.is_ready, request_timeout_s=request_timeout_s
    )
    assert isinstance(server.address, TcpAddress)
    served.address = server.address
    server.start()
    try:
        yield served
    finally:
        server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(Cups(3), request_timeout_s=WAIT_S) as served:
        yield served


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes or cuts the connection."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(2**16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def status_of(served: Served, request: bytes) -> int:
    with served.connect() as connection:
        connection.sendall(request)
        return int(all_of(connection).split()[1])


# ---- pages


def test_port_0_gives_a_port(served: Served) -> None:
    assert served.address.port > 0


def test_metrics_are_in_prometheus_text(served: Served) -> None:
    reply = served.get("/metrics")
    assert reply.status == 200
    assert reply.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    (cups,) = read_text(reply.read().decode())
    assert [sample.value for sample in cups.samples] == [0, 1, 2]


def test_openmetrics_is_for_those_who_ask_for_it(served: Served) -> None:
    reply = served.get("/metrics", accept=OPENMETRICS)
    assert str(reply.getheader("Content-Type")).startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    text = reply.read().decode()
    assert text.endswith("# EOF\n")
    (cups,) = read_openmetrics(text)
    assert (cups.type, len(cups.samples)) == ("counter", 3)


def test_samples_can_be_chosen_by_name(served: Served) -> None:
    assert len(list(read_text(served.get("/metrics?name[]=cups_total").read().decode()))) == 1
    assert served.get("/metrics?name%5B%5D=spoons").read() == b""


def test_it_is_alive_whether_it_serves_or_not(served: Served) -> None:
    for served.is_ready in (False, True):
        assert served.get("/healthz").status == 200


def test_it_is_ready_while_it_serves(served: Served) -> None:
    assert served.get("/readyz").status == 503
    served.is_ready = True
    assert served.get("/readyz").status == 200
    served.is_ready = False
    assert served.get("/readyz").status == 503


@pytest.mark.parametrize("path", ["/", "/metrics/", "/healthz/x", "//", "http://[", "/%6detrics"])
def test_other_paths_are_not_found(served: Served, path: str) -> None:
    assert status_of(served, f"GET {path} HTTP/1.1\r\n\r\n".encode()) == 404


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "get"])
def test_other_methods_are_refused(served: Served, method: str) -> None:
    reply = served.request(method, "/metrics")
    assert (reply.status, reply.getheader("Allow")) == (405, "GET")


def test_a_collector_that_fails_is_an_error_of_the_server_and_the_next_page_comes() -> None:
    with serving(Broken()) as served:
        assert served.get("/metrics").status == 500
        assert served.get("/healthz").status == 200


# ---- nonsense


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET  /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\xff\x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(served: Served, request_bytes: bytes) -> None:
    assert status_of(served, request_bytes) == 400
    assert served.get("/healthz").status == 200


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_headers_without_an_end_are_refused(served: Served, end: bytes) -> None:
    with served.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (2 * MAX_REQUEST_BYTES) + end)
        assert all_of(connection).startswith((b"HTTP/1.1 431 ", b""))
    assert served.get("/healthz").status == 200


def test_a_header_never_ends_up_in_the_reply(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(
            b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n"
            b" Set-Cookie: a=b;escaping=x\r\n\r\n"
        )
        head = all_of(connection).partition(b"\r\n\r\n")[0]
    assert b"Cookie" not in head


# ---- slow, and many


def test_a_peer_that_says_nothing_is_cut() -> None:
    with serving(request_timeout_s=0.05) as served, served.connect() as connection:
        assert all_of(connection) == b""


def test_a_peer_that_sends_byte_by_byte_is_cut_all_the_same() -> None:
    with serving(request_timeout_s=0.2) as served, served.connect() as connection:
        connection.settimeout(0.01)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"x")
                try:
                    if connection.recv(1) == b"":
                        raise ConnectionAbortedError
                except TimeoutError:
                    continue


def test_a_peer_that_does_not_read_is_cut() -> None:
    text = "x" * 2**24  # More than the buffers of both sides hold.
    with serving(Cups(1, text), request_timeout_s=0.2) as served, served.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        # The reply has been begun before this connection, and its time ends before this one's.
        with served.connect() as silent:
            assert all_of(silent) == b""
        assert len(all_of(connection)) < len(text)


def test_a_peer_that_hangs_up_early_harms_nobody(served: Served) -> None:
    for request in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        with served.connect() as connection:
            connection.sendall(request)
    assert served.get("/healthz").status == 200


def test_silent_connections_do_not_keep_others_out(served: Served) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(2 * MAX_CONNECTIONS)]
        assert served.get("/metrics").status == 200
        # Those that have been open longest were cut for it.
        assert all(all_of(connection) == b"" for connection in silent[:MAX_CONNECTIONS])
        silent[-1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert all_of(silent[-1]).startswith(b"HTTP/1.1 200 ")


def test_closing_cuts_what_is_open() -> None:
    with ExitStack() as stack:
        with serving() as served:
            silent = stack.enter_context(served.connect())
            assert served.get("/healthz").status == 200
        assert all_of(silent) == b""
        with pytest.raises(ConnectionError):
            served.connect()


# ---- addresses


def test_a_port_that_is_taken_is_refused_by_the_settings_name(served: Served) -> None:
    with pytest.raises(InvalidArgumentError, match=str(served.address.port)) as caught:
        MetricsServer(served.address, CollectorRegistry(), bool)
    assert caught.value.field == "metrics_listen"


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot listen on 192\.0\.2\.1:0"):
        MetricsServer(TcpAddress("192.0.2.1", 0), CollectorRegistry(), bool)


def test_a_server_that_was_never_started_can_be_closed() -> None:
    server = MetricsServer(LOOPBACK, CollectorRegistry(), bool)
    server.close()
    assert isinstance(server.address, TcpAddress)
    with pytest.raises(ConnectionError):
        socket.create_connection((server.address.host, server.address.port), WAIT_S)


def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "metrics.sock"))
    server = MetricsServer(address, CollectorRegistry(), bool)
    server.start()
    try:
        assert stat.S_ISSOCK(os.stat(address.path).st_mode)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(address.path)
            connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert all_of(connection).startswith(b"HTTP/1.1 200 ")
    finally:
        server.close()
