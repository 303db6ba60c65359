"""Which files the daemon has to have room for."""

from __future__ import annotations

import pytest

from prefixcache.server.open_files import FILES_A_PEER, MIN_PEERS, peers_that_fit


@pytest.mark.parametrize(
    ("num_files", "fit"),
    [
        (FILES_A_PEER * 4096, 4096),
        (FILES_A_PEER * 4096 - 1, 4095),
        (10**6, 4096),
        (FILES_A_PEER * MIN_PEERS, MIN_PEERS),
        (0, MIN_PEERS),
        (-5, MIN_PEERS),
    ],
)
def test_peers_leave_the_connections_their_files(num_files: int, fit: int) -> None:
    assert peers_that_fit(num_files, 4096) == fit
