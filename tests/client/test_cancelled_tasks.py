"""A task that is cancelled leaves nothing in the daemon, though its client lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from prefixcache import AsyncClient
from prefixcache.errors import SequenceNotFoundError
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants

PROMPT = list(range(10))


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(num_blocks=16, block_size=4)) as daemon:
        yield daemon


async def cancel_while_the_daemon_works(running: RunningDaemon, coroutine: Awaitable[Any]) -> None:
    """Cancel once the request has gone out; the daemon answers it afterwards."""
    with running.daemon.sequences.lock:
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.sleep(0.2)


async def until_free(running: RunningDaemon) -> None:
    deadline = time.monotonic() + 10
    sequences = running.daemon.sequences
    while len(sequences.live) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    with sequences.lock:
        assert len(sequences.live) == 0
        assert sequences.pool.num_referenced == 0
        check_invariants(sequences)


def run(running: RunningDaemon, main: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def with_client() -> None:
        async with AsyncClient(running.target) as client:
            await client.server_info()
            await main(client)

    asyncio.run(with_client())


def test_a_sequence_whose_opening_is_cancelled_is_freed(running: RunningDaemon) -> None:
    async def main(client: AsyncClient) -> None:
        async def use() -> None:
            async with client.sequence(PROMPT):
                raise AssertionError

        await (await client.sequence(PROMPT)).free()
        await cancel_while_the_daemon_works(running, use())
        await until_free(running)
        assert running.daemon.sequences.counters.requests == 2

    run(running, main)


def test_children_whose_fork_is_cancelled_are_freed(running: RunningDaemon) -> None:
    async def main(client: AsyncClient) -> None:
        async with client.sequence(PROMPT) as parent:
            await parent.commit(len(PROMPT))
            await cancel_while_the_daemon_works(running, parent.fork(3))
        await until_free(running)

    run(running, main)


def test_a_free_that_is_cancelled_is_done_all_the_same(running: RunningDaemon) -> None:
    async def main(client: AsyncClient) -> None:
        sequence = await client.sequence(PROMPT)
        await cancel_while_the_daemon_works(running, sequence.free())
        await until_free(running)

    run(running, main)


def test_a_sequence_that_the_caller_can_ask_for_again_is_kept(running: RunningDaemon) -> None:
    async def main(client: AsyncClient) -> None:
        async def use() -> None:
            await client.sequence(PROMPT, request_id="mine")

        await cancel_while_the_daemon_works(running, use())
        sequence = await client.sequence(PROMPT, request_id="mine")
        await asyncio.sleep(0.2)
        await sequence.commit(len(PROMPT))
        await sequence.free()
        with pytest.raises(SequenceNotFoundError):
            await sequence.append([1])

    run(running, main)
