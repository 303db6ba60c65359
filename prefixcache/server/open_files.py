"""How many files the process may have open: each connection is one.

The usual soft limit, 1024, is for programs that use select(2); this one does not, so it takes the
hard limit.
"""

from __future__ import annotations

import resource

import structlog

_log = structlog.get_logger(__name__)

OWN_FILES = 128
"""What the daemon has open beside its connections, with room to spare."""


def raise_limit(max_connections: int) -> None:
    """Raise the soft limit to the hard one; warn if the connections could still exceed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _log.info("raised the limit of open files", before=soft, now=hard)
    if hard != resource.RLIM_INFINITY and hard < max_connections + OWN_FILES:
        _log.warning(
            "the hard limit of open files is too low for --max-connections: new connections will "
            "wait while it is reached",
            open_files=hard,
            max_connections=max_connections,
        )
