"""The peer socket of a daemon in the test's process, and arenas that a test makes by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixcache.address import UnixAddress
from prefixcache.client.peer_connection import PeerConnection
from prefixcache.rpc.peer_protocol import ARENA_ID, PeerMessage
from prefixcache.server.access import Access, OpenAccess
from prefixcache.server.peer_arenas import ArenaRequests
from prefixcache.server.peer_socket import PeerSocket, peer_socket_path
from prefixcache.storage.shared_memory import create_shared_memory, map_shared_memory
from tests.support.daemon import RunningDaemon


@contextmanager
def peer_socket(running: RunningDaemon, access: Access | None = None) -> Iterator[PeerSocket]:
    """As the life cycle makes it, for arenas alone."""
    path = peer_socket_path(Path(running.target.removeprefix("unix:")))
    with closing(PeerSocket()) as peers:
        ArenaRequests(running.daemon.arenas, access or OpenAccess()).serve(peers)
        peers.listen(path)
        peers.start()
        try:
            yield peers
        finally:
            path.unlink()


@contextmanager
def connection_to(running: RunningDaemon) -> Iterator[PeerConnection]:
    connection = PeerConnection(UnixAddress(running.target.removeprefix("unix:")))
    with closing(connection):
        yield connection


class OwnArena:
    """Memory of a client, registered on a connection of its own until `close`."""

    def __init__(self, running: RunningDaemon, num_bytes: int, token: str = "") -> None:
        fd = create_shared_memory("arena-of-a-test", num_bytes)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(
            memoryview(map_shared_memory(fd, num_bytes, writable=True)), np.uint8
        )
        self._connection = PeerConnection(UnixAddress(running.target.removeprefix("unix:")))
        try:
            answer = self._connection.ask(PeerMessage.ARENA, token.encode(), [fd])
        except OSError:
            self._connection.close()
            raise
        finally:
            os.close(fd)
        (self.arena_id,) = ARENA_ID.unpack(answer.rest)

    def close(self) -> None:
        self._connection.close()
