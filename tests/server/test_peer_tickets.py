"""Tickets: who gets one on the peer socket, and for how long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from prefixcache.address import UnixAddress
from prefixcache.client.peer_connection import PeerConnection, PeerRefusedError
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.server.auth_file import token_hash
from prefixcache.server.peer_socket import PeerSocket, peer_socket_path
from prefixcache.server.peer_tickets import PeerTickets
from tests.support.waiting import until


class Served:
    def __init__(self, path: Path, tickets: PeerTickets) -> None:
        self._path, self.tickets = path, tickets

    @contextmanager
    def connection(self) -> Iterator[PeerConnection]:
        with closing(PeerConnection(UnixAddress(str(self._path)))) as connected:
            yield connected

    def is_known(self, ticket: str) -> bool:
        return self.tickets.peer_with(token_hash(ticket)) is not None


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    tickets = PeerTickets()
    path = tmp_path / "sock"
    with closing(PeerSocket()) as peers:
        peers.answer(PeerMessage.TICKET, tickets.give)
        peers.listen(peer_socket_path(path))
        peers.start()
        yield Served(path, tickets)
    assert len(tickets) == 0


def ticket_on(connected: PeerConnection) -> str:
    ticket = connected.ask(PeerMessage.TICKET).rest.decode()
    assert len(ticket) >= 43
    return ticket


def test_a_ticket_stands_for_the_user_as_long_as_the_connection(served: Served) -> None:
    with served.connection() as one, served.connection() as other:
        first, second = ticket_on(one), ticket_on(other)
        assert first != second
        peer = served.tickets.peer_with(token_hash(first))
        assert peer is not None
        assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
        assert peer.gids >= {os.getegid(), *os.getgroups()}
        one.close()
        until(lambda: not served.is_known(first))
        assert served.is_known(second)


def test_asking_again_gives_the_same_ticket(served: Served) -> None:
    with served.connection() as one:
        assert ticket_on(one) == ticket_on(one)
        assert len(served.tickets) == 1


def test_a_request_with_something_in_it_is_refused(served: Served) -> None:
    with served.connection() as one, pytest.raises(PeerRefusedError, match="nothing in it"):
        one.ask(PeerMessage.TICKET, b"x")


def test_the_end_of_the_socket_ends_all_tickets(served: Served) -> None:
    with served.connection() as one:
        assert served.is_known(ticket_on(one))
        # and the fixture looks whether one is left
