"""Waits for what another process or thread does, without a limit that a slow machine would miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Only a test that fails waits this long."""


def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it has not come to that"
        time.sleep(0.01)


async def until_async(condition: Callable[[], object]) -> None:
    """`until`, while the other tasks of the event loop run."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)
