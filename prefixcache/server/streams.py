"""Streams of requests: how many are open, in whose threads, and how they end.

A stream keeps a thread as long as it is open, so streams have threads of their own. Safe to use
from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from prefixcache.core.tenants import NO_TENANT
from prefixcache.errors import DrainingError, TooManyStreamsError
from prefixcache.server.places import Places, Tenants, nobody

_REFUSING_THREADS = 2


class Streams:
    """The open streams of one RPC, at most `limit`, and the requests on them being answered.

    One stream more is refused and not left to wait: nobody knows for how long. So there are
    threads on top of the limit, to refuse with. tenants: each can always have its share of it.
    """

    def __init__(self, limit: int, name: str, tenants: Tenants = nobody) -> None:
        self.workers = ThreadPoolExecutor(limit + _REFUSING_THREADS, name)
        self._limit = limit
        self._places = Places(limit, tenants)
        self._changed = threading.Condition()
        self._num_answering = 0
        self._is_closing = False

    @contextmanager
    def opened(self, tenant: str = NO_TENANT) -> Iterator[None]:
        """A stream of that tenant is open meanwhile. Raises TooManyStreamsError."""
        if not self._places.take(tenant):
            raise TooManyStreamsError(self._limit)
        try:
            yield
        finally:
            self._places.give_back(tenant)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A request is being answered meanwhile. Raises DrainingError once `close` was called."""
        with self._changed:
            if self._is_closing:
                raise DrainingError
            self._num_answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_answering -= 1
                if not self._num_answering:
                    self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Take no more requests, and wait for the answers to those that were taken.

        False if that takes longer. Streams without a request stay open: the server cuts them.
        """
        with self._changed:
            self._is_closing = True
            return self._changed.wait_for(lambda: not self._num_answering, timeout_s)
