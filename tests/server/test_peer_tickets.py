"""The peer socket: who gets a ticket, for how long, and what peers cannot do there."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from prefixcache.server.auth_file import token_hash
from prefixcache.server.peer_tickets import FIRST_REQUEST_TIMEOUT_S, PeerTickets, peer_socket_path
from tests.support.waiting import WAIT_S, until

ASK = struct.pack(">IB", 1, 1)


class Served:
    def __init__(self, tickets: PeerTickets, path: Path, clock_s: list[float]) -> None:
        self.tickets, self.path, self.clock_s = tickets, path, clock_s

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(WAIT_S)
            connected.connect(str(self.path))
            yield connected

    def is_known(self, ticket: str) -> bool:
        return self.tickets.peer_with(token_hash(ticket)) is not None


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[PeerTickets] = []

    def start(**limits: int) -> Served:
        clock_s = [0.0]
        tickets = PeerTickets(clock=lambda: clock_s[0], **limits)
        started.append(tickets)
        path = tmp_path / f"{len(started)}.peer"
        tickets.listen(path)
        tickets.start()
        return Served(tickets, path, clock_s)

    yield start
    for tickets in started:
        tickets.close()


def received(connected: socket.socket) -> tuple[int, str]:
    """Kind and rest of the next message."""
    with connected.makefile("rb", buffering=0) as file:
        header = file.read(4)
        assert header is not None
        (length,) = struct.unpack(">I", header)
        message = file.read(length)
        assert message is not None
    return message[0], message[1:].decode()


def ticket_on(connected: socket.socket) -> str:
    connected.sendall(ASK)
    kind, ticket = received(connected)
    assert kind == 1
    assert len(ticket) >= 43
    return ticket


def is_closed(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_ticket_stands_for_the_user_as_long_as_the_connection(serve: Serve) -> None:
    served = serve()
    with served.connection() as one, served.connection() as other:
        first, second = ticket_on(one), ticket_on(other)
        assert first != second
        peer = served.tickets.peer_with(token_hash(first))
        assert peer is not None
        assert peer.uid == os.geteuid()
        assert peer.gids >= {os.getegid(), *os.getgroups()}
        one.close()
        until(lambda: not served.is_known(first))
        assert served.is_known(second)


def test_asking_again_gives_the_same_ticket(serve: Serve) -> None:
    served = serve()
    with served.connection() as one:
        assert ticket_on(one) == ticket_on(one)
        one.sendall(ASK[:2])
        one.sendall(ASK[2:] + ASK)
        assert received(one) == received(one)


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack(">IB", 1, 2),
        struct.pack(">IBB", 2, 1, 0),
        struct.pack(">I", 0),
        struct.pack(">I", 65) + bytes(65),
        b"\xff" * 300,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_ends_the_connection(serve: Serve, request_bytes: bytes) -> None:
    served = serve()
    with served.connection() as bad, served.connection() as good:
        ticket = ticket_on(good)
        bad.sendall(request_bytes)
        kind, problem = received(bad)
        assert (kind, bool(problem)) == (0, True)
        assert is_closed(bad)
        assert served.is_known(ticket)


def test_silent_peers_are_sent_away_and_hold_nobody_up(serve: Serve) -> None:
    served = serve()
    with served.connection() as silent, served.connection() as slow, served.connection() as good:
        slow.sendall(ASK[:3])
        ticket = ticket_on(good)
        served.clock_s[0] = FIRST_REQUEST_TIMEOUT_S
        assert is_closed(silent)
        assert is_closed(slow)
        assert served.is_known(ticket)


@pytest.mark.parametrize("limits", [{"max_peers": 2}, {"max_peers_a_user": 2}])
def test_no_more_peers_than_the_limit(serve: Serve, limits: dict[str, int]) -> None:
    served = serve(**limits)
    with served.connection() as one, served.connection() as two, served.connection() as three:
        ticket_on(one)
        ticket_on(two)
        assert received(three)[0] == 0
        assert is_closed(three)
        one.close()
        until(lambda: _gets_a_ticket(served))


def _gets_a_ticket(served: Served) -> bool:
    with served.connection() as connected:
        # A refusal comes without a request, and then there is nobody who reads one.
        with suppress(BrokenPipeError):
            connected.sendall(ASK)
        return received(connected)[0] == 1


def test_a_peer_that_reads_no_answers_is_dropped(serve: Serve) -> None:
    served = serve()
    with served.connection() as deaf, served.connection() as good:
        ticket = ticket_on(deaf)
        deaf.setblocking(False)
        with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):
            while True:
                deaf.send(ASK * 1000)
        until(lambda: not served.is_known(ticket))
        ticket_on(good)


def test_closing_ends_all_tickets_and_the_thread(tmp_path: Path) -> None:
    tickets = PeerTickets()
    path = peer_socket_path(tmp_path / "sock")
    assert path.name == "sock.peer"
    tickets.listen(path)
    assert path.stat().st_mode & 0o777 == 0o660
    tickets.start()
    served = Served(tickets, path, [])
    with served.connection() as connected:
        ticket = ticket_on(connected)
        tickets.close()
        assert not served.is_known(ticket)
        assert is_closed(connected)
    assert "peer-tickets" not in {thread.name for thread in threading.enumerate()}
