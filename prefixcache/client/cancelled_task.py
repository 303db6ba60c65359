"""Tells a task that was cancelled from a gRPC call that was: both raise CancelledError."""

from __future__ import annotations

import asyncio


def current_task_is_cancelled() -> bool:
    """The task is, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
