"""Keeps a session alive from a task of its own: the twin of `sync_keeper`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from prefixcache.client import session_calls
from prefixcache.client.cancelled_task import current_task_is_cancelled
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.lease import Lease
from prefixcache.client.sync_keeper import FIRST_BEAT_WAIT_S, FIRST_WAIT_S
from prefixcache.rpc.status import from_rpc_error


class AsyncSessionKeeper:
    """Beats three times in a session's TTL, and reconnects when its stream breaks.

    Ends when the session is lost, which its lease knows then, when told to, with the channel and
    with the event loop. It beats only while that loop runs and is not held up. It knows no client,
    so that one which is forgotten without `close` can go.
    """

    def __init__(self, open_stream: Callable[..., Any], lease: Lease, home: HomeProcess) -> None:
        self._open_stream = open_stream
        self._lease = lease
        self._home = home
        self._was_tried = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    async def wait_for_first_beat(self) -> None:
        """Until it is answered or fails, or for FIRST_BEAT_WAIT_S.

        From then on the daemon notices the end of this process. Sequences made before would wait
        for the session's TTL.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._was_tried.wait(), FIRST_BEAT_WAIT_S)

    async def stop(self) -> None:
        """No more beats; the daemon sees the stream end."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def abandon(self) -> None:
        """`stop` without waiting, from any thread. Nothing in a forked child."""
        if self._home.is_here and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> None:
        wait_s = 0.0
        while not self._lease.is_lost:
            await asyncio.sleep(wait_s)
            try:
                was_answered = await self._beat_on_one_stream()
            except grpc.aio.UsageError:  # the channel is closed
                return
            longer_s = max(2 * wait_s, FIRST_WAIT_S)
            wait_s = 0.0 if was_answered else min(longer_s, self._lease.beat_interval_s)

    async def _beat_on_one_stream(self) -> bool:
        """Until it has broken; returns whether a beat was answered."""
        was_answered = False
        stream = self._open_stream(wait_for_ready=True)
        has_ended = asyncio.Event()
        stream.add_done_callback(lambda _: has_ended.set())
        try:
            while not self._lease.is_lost:
                await stream.write(session_calls.keep_alive(self._lease))
                reply = await stream.read()
                if reply is grpc.aio.EOF:
                    break
                self._lease.answered_by(reply.boot_id)
                was_answered = True
                self._was_tried.set()
                with suppress(TimeoutError):
                    await asyncio.wait_for(has_ended.wait(), self._lease.beat_interval_s)
        except grpc.RpcError as failure:
            self._lease.failed(from_rpc_error(failure))
        except asyncio.InvalidStateError:  # of `write`, if the stream has ended well
            pass
        except asyncio.CancelledError:
            if current_task_is_cancelled():
                raise
        finally:
            self._was_tried.set()
            stream.cancel()
        return was_answered
