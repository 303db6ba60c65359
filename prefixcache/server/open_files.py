"""How many files the process may have open, and for whom they are.

Each connection is one, and each process on the peer socket is up to three: its connection, its
pidfd, and the flag of its attachment. The usual soft limit, 1024, is for programs that use
select(2); this one does not, so it takes the hard limit. Where that is low, it is the processes on
the peer socket that are fewer, so that they leave the calls their connections.
"""

from __future__ import annotations

import resource

import structlog

_log = structlog.get_logger(__name__)

OWN_FILES = 256
"""What the daemon has open besides: connections that read metrics, descriptors that are on their
way, and files of its own, with room to spare.
"""
FILES_A_PEER = 3
MIN_PEERS = 16


def raise_limit(max_connections: int, max_peers: int) -> int:
    """Raise the soft limit to the hard one; warn if the connections could still exceed it.

    max_connections: to all addresses. max_peers: processes on the peer socket. Returns how many of
    them there may be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _log.info("raised the limit of open files", before=soft, now=hard)
    if hard == resource.RLIM_INFINITY:
        return max_peers
    left = hard - max_connections - OWN_FILES
    if left < 0:
        _log.warning(
            "the hard limit of open files is too low for --max-connections: new connections will "
            "wait while it is reached",
            open_files=hard,
            max_connections=max_connections,
        )
    return peers_that_fit(left, max_peers)


def peers_that_fit(num_files: int, max_peers: int) -> int:
    return min(max_peers, max(MIN_PEERS, num_files // FILES_A_PEER))
