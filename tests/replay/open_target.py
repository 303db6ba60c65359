"""Both kinds of target, each fresh and empty, under one name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefixcache.client import Client
from prefixcache.replay import DaemonTarget, InProcessTarget, Target
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import running_daemon

TARGETS = ("in_process", "daemon")


@contextmanager
def open_target(kind: str, num_blocks: int, block_size: int) -> Iterator[Target]:
    if kind == "in_process":
        yield InProcessTarget(num_blocks, block_size)
        return
    cache = CacheOptions(num_blocks=num_blocks, block_size=block_size)
    with running_daemon(cache) as running, Client(running.target) as client:
        yield DaemonTarget(client)
