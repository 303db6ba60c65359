"""One thread or task at a time opens a client's session; the others wait, each for its own time.

Without that time, the calls of many threads to a daemon that does not answer would end one after
another, the last of them many timeouts late.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prefixcache.errors import DeadlineExceededError


class Opening:
    """Of threads. `AsyncOpening` is its twin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Raises DeadlineExceededError if others hold it for so long."""
        if not self._lock.acquire(timeout=_bounded(timeout_s)):
            raise _late(timeout_s)
        try:
            yield
        finally:
            self._lock.release()


class AsyncOpening:
    """Of tasks."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def held(self, timeout_s: float) -> AsyncIterator[None]:
        """Raises DeadlineExceededError if others hold it for so long."""
        try:
            async with asyncio.timeout(_bounded(timeout_s)):
                await self._lock.acquire()
        except TimeoutError:
            raise _late(timeout_s) from None
        try:
            yield
        finally:
            self._lock.release()


def _bounded(timeout_s: float) -> float:
    return min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)


def _late(timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"another call of the client was still opening its session after {timeout_s:g} s"
    )
