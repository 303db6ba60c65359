"""The sync and the async client are one client: methods, signatures, code, results."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re

import pytest

from prefixcache import AsyncClient, AsyncEventStream, AsyncSequence, Client, EventStream, Sequence
from prefixcache.client import (
    aio,
    aio_connection,
    aio_events,
    aio_sequence,
    aio_steps,
    sync,
    sync_connection,
    sync_events,
    sync_sequence,
    sync_steps,
)
from prefixcache.client.aio_connection import AsyncConnection
from prefixcache.client.aio_steps import AsyncStepStream
from prefixcache.client.sync_connection import Connection
from prefixcache.client.sync_steps import StepStream
from prefixcache.errors import PrefixCacheError
from prefixcache.rpc._pb import admin_pb2, cache_pb2
from tests.client.fake_daemon import allocated, fake_daemon
from tests.client.twins import open_client
from tests.rpc.test_status import EXAMPLES

PAIRS = [
    (Client, AsyncClient),
    (Connection, AsyncConnection),
    (Sequence, AsyncSequence),
    (StepStream, AsyncStepStream),
    (EventStream, AsyncEventStream),
]
MODULES = [
    (sync, aio),
    (sync_connection, aio_connection),
    (sync_sequence, aio_sequence),
    (sync_steps, aio_steps),
    (sync_events, aio_events),
]
NO_COROUTINES = (
    "Client.sequence",
    "StepStream.new_step",
    "StepStream.send",
    "EventStream.position",
)
"""Methods of an async class that need no await: they make or tell something, `send` only queues."""
ASYNC_WORDS = [
    ("grpc.aio.Channel", "grpc.Channel"),
    ("make_channel(grpc.aio,", "make_channel(grpc,"),
    ("__aenter__", "__enter__"),
    ("__aexit__", "__exit__"),
    ("async with", "with"),
    ("AsyncClient", "Client"),
    ("AsyncConnection", "Connection"),
    ("AsyncSequence", "Sequence"),
    ("AsyncStepStream", "StepStream"),
    ("AsyncEventStream", "EventStream"),
    ("__aiter__", "__iter__"),
    ("__anext__", "__next__"),
    ("AsyncSessionKeeper", "SessionKeeper"),
    ("AsyncOpening", "Opening"),
    ("_keeper.abandon", "_keeper.stop"),
    ("AsyncIterator", "Iterator"),
    ("OpeningSequence", "Sequence"),
]


def _without_async(text: str) -> str:
    for asynchronous, synchronous in ASYNC_WORDS:
        text = text.replace(asynchronous, synchronous)
    return re.sub(r"\s+", " ", text)


def _public(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize(("synchronous", "asynchronous"), PAIRS)
def test_both_have_the_same_public_methods_with_the_same_signatures(synchronous, asynchronous):
    assert list(_public(synchronous)) == list(_public(asynchronous))
    for name in [*_public(synchronous), "__init__"]:
        one, other = getattr(synchronous, name), getattr(asynchronous, name)
        signature = _without_async(str(inspect.signature(other)))
        assert signature == str(inspect.signature(one)), name
        is_plain = name == "__init__" or f"{synchronous.__name__}.{name}" in NO_COROUTINES
        assert inspect.iscoroutinefunction(other) is not is_plain, name


class _Synchronous(ast.NodeTransformer):
    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        return ast.FunctionDef(
            **{name: getattr(node, name, []) for name in ast.FunctionDef._fields}
        )

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self.visit(node.value)


def _methods(module: object, class_name: str) -> dict[str, str]:
    tree = _Synchronous().visit(ast.parse(inspect.getsource(module)))
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    return {
        _without_async(node.name): _without_async(ast.unparse(ast.fix_missing_locations(node)))
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize(("pair", "modules"), list(zip(PAIRS, MODULES, strict=True)))
def test_the_code_of_both_differs_by_await_only(pair, modules):
    one, other = (_methods(m, c.__name__) for m, c in zip(modules, pair, strict=True))
    if pair[0] is Client:
        # An `async with` needs an object that can be awaited, so this one allocates elsewhere.
        del one["sequence"], other["sequence"]
    if pair[0] is Connection:
        # A task can be cancelled while it waits for a reply, a thread cannot.
        del one["__init__"], other["__init__"]  # one more check, of gRPC's asyncio side
        del one["_reply"], other["_reply"], other["_give_back"]
        # A thread may wait for a ticket or an arena, an event loop must not.
        for name in ("_renewed", "arena"):
            del one[name], other[name]
    if pair[0] is StepStream:
        # A queue for threads and one for tasks, and a wait that ends: gRPC's threads have none.
        for name in ("__init__", "send", "wait", "_receive", "_end"):
            del one[name], other[name]
    if pair[0] is EventStream:
        # What gRPC's two kinds of streams have for the next reply and for the end.
        for name in ("__init__", "_receive"):
            del one[name], other[name]
    assert one == other


def test_results_of_both_are_equal():
    results = {}
    for kind in ("sync", "async"):
        with fake_daemon() as fake, open_client(kind, fake.target) as client:
            fake.will("Lookup", cache_pb2.LookupResponse(num_cached_tokens=3, block_hashes=[b"h"]))
            fake.will("Allocate", allocated(7, cached=3, blocks=(4, 5)))
            fake.will(
                "GetStats", admin_pb2.GetStatsResponse(num_blocks=9, hit_tokens=3, queries_tokens=6)
            )
            fake.will("Truncate", cache_pb2.TruncateResponse(dropped_block_ids=[5]))
            found = client.lookup([1, 2], want_hashes=True)
            with client.sequence(range(6), request_id="r") as sequence:
                state = (sequence.sequence_id, sequence.num_tokens, sequence.block_ids.tolist())
                dropped = sequence.truncate(2)
            stats = client.stats()
            results[kind] = (client.server_info(), found, state, dropped, stats, stats.hit_rate)
            fake.requests.pop("KeepAlive", None)  # from a thread or task of its own
            assert list(fake.requests) == [
                "GetServerInfo",
                "Lookup",
                "OpenSession",
                "Allocate",
                "Truncate",
                "Free",
                "GetStats",
            ]
    assert results["sync"] == results["async"]


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda error: error.reason)
def test_both_raise_the_error_that_the_daemon_raised(client, fake, error):
    fake.will("ResetCache", error)
    with pytest.raises(PrefixCacheError) as caught:
        client.reset_cache()
    assert type(caught.value) is type(error)
    assert caught.value.message == error.message
    assert set(error.fields) < set(caught.value.fields)


def test_an_async_sequence_is_opened_by_await_or_by_async_with():
    async def main(target: str) -> None:
        async with AsyncClient(target) as client:
            async with client.sequence([1]) as sequence:
                assert isinstance(sequence, AsyncSequence)
            assert sequence.is_freed
            async with await client.sequence([1]) as sequence:
                assert isinstance(sequence, AsyncSequence)
            assert sequence.is_freed
            with pytest.raises(ZeroDivisionError):
                async with client.sequence([1]) as sequence:
                    raise ZeroDivisionError
            assert sequence.is_freed
            with pytest.raises(PrefixCacheError):
                async with client.sequence([-1]):
                    raise AssertionError

    with fake_daemon() as fake:
        fake.will("Allocate", *[allocated(i, blocks=(0,)) for i in (7, 8, 9)])
        asyncio.run(main(fake.target))
        assert [list(request.sequence_ids) for request in fake.requests["Free"]] == [[7], [8], [9]]


def test_calls_of_many_tasks_run_at_the_same_time():
    async def main(target: str) -> list[int]:
        async with AsyncClient(target) as client:
            sequences = await asyncio.gather(*(client.sequence([i]) for i in range(20)))
            await client.free(sequences)
            return [sequence.sequence_id for sequence in sequences]

    with fake_daemon() as fake:
        fake.will("Allocate", *[lambda r: allocated(r.token_ids[0] + 1)] * 20)
        assert asyncio.run(main(fake.target)) == list(range(1, 21))


def test_a_cancelled_task_frees_its_sequence():
    async def main(target: str) -> None:
        entered = asyncio.Event()

        async def work(client: AsyncClient) -> None:
            async with client.sequence([1]):
                entered.set()
                await asyncio.Event().wait()

        async with AsyncClient(target) as client:
            task = asyncio.create_task(work(client))
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with fake_daemon() as fake:
        fake.will("Allocate", allocated(7, blocks=(0,)))
        asyncio.run(main(fake.target))
        assert [list(request.sequence_ids) for request in fake.requests["Free"]] == [[7]]
