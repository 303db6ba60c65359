"""A task that is cancelled leaves nothing in the daemon, though its client lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from prefixcache import AsyncClient
from prefixcache.errors import SequenceNotFoundError
from prefixcache.server.daemon import CacheOptions
from tests.support.arrivals import Arrivals
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants
from tests.support.waiting import until_async

PROMPT = list(range(10))


class Served:
    """A daemon, and what has come to it."""

    def __init__(self, running: RunningDaemon, arrivals: Arrivals) -> None:
        self.target = running.target
        self.sequences = running.daemon.sequences
        self._counts = running.server.call_counts
        self._arrivals = arrivals.num_by_rpc

    def num_unanswered(self) -> int:
        ended = (counts.read().durations.count for counts in self._counts.values())
        return self._arrivals.total() - sum(ended)


@pytest.fixture
def served() -> Iterator[Served]:
    arrivals = Arrivals()
    cache = CacheOptions(num_blocks=16, block_size=4)
    with running_daemon(cache, tracing=arrivals) as running:
        yield Served(running, arrivals)


async def cancel_while_the_daemon_works(served: Served, coroutine: Awaitable[Any]) -> None:
    """Cancel once the daemon has the request, which it answers afterwards."""
    await until_async(lambda: not served.num_unanswered())
    with served.sequences.lock:
        task = asyncio.ensure_future(coroutine)
        await until_async(served.num_unanswered)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_async(lambda: not served.num_unanswered())


async def until_free(served: Served) -> None:
    sequences = served.sequences
    await until_async(lambda: not len(sequences.live))
    with sequences.lock:
        assert len(sequences.live) == 0
        assert sequences.pool.num_referenced == 0
        check_invariants(sequences)


def run(served: Served, main: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def with_client() -> None:
        async with AsyncClient(served.target) as client:
            await client.server_info()
            await main(client)

    asyncio.run(with_client())


def test_a_sequence_whose_opening_is_cancelled_is_freed(served: Served) -> None:
    async def main(client: AsyncClient) -> None:
        async def use() -> None:
            async with client.sequence(PROMPT):
                raise AssertionError

        await (await client.sequence(PROMPT)).free()
        await cancel_while_the_daemon_works(served, use())
        await until_free(served)
        assert served.sequences.counters.requests == 2

    run(served, main)


def test_children_whose_fork_is_cancelled_are_freed(served: Served) -> None:
    async def main(client: AsyncClient) -> None:
        async with client.sequence(PROMPT) as parent:
            await parent.commit(len(PROMPT))
            await cancel_while_the_daemon_works(served, parent.fork(3))
        await until_free(served)

    run(served, main)


def test_a_free_that_is_cancelled_is_done_all_the_same(served: Served) -> None:
    async def main(client: AsyncClient) -> None:
        sequence = await client.sequence(PROMPT)
        await cancel_while_the_daemon_works(served, sequence.free())
        await until_free(served)

    run(served, main)


def test_a_sequence_that_the_caller_can_ask_for_again_is_kept(served: Served) -> None:
    async def main(client: AsyncClient) -> None:
        async def use() -> None:
            await client.sequence(PROMPT, request_id="mine")

        await cancel_while_the_daemon_works(served, use())
        sequence = await client.sequence(PROMPT, request_id="mine")
        await asyncio.sleep(0.2)
        await sequence.commit(len(PROMPT))
        await sequence.free()
        with pytest.raises(SequenceNotFoundError):
            await sequence.append([1])

    run(served, main)
