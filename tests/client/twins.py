"""The async client behind the methods of the sync one, so that one test speaks to both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prefixcache import AsyncClient, AsyncSequence, Client
from prefixcache.client.aio_events import AsyncEventStream
from prefixcache.client.aio_sequence import OpeningSequence
from prefixcache.client.aio_steps import AsyncStepStream
from prefixcache.client.step import Pending, Step
from prefixcache.errors import UnavailableError
from tests.support.waiting import until

_TO_WRAP = (AsyncSequence, AsyncStepStream, AsyncEventStream, Step, Pending)
"""Steps and results do no I/O; they take and give sequences."""


class Blocking:
    """An async client, or what it gives, whose methods wait for their result."""

    def __init__(self, subject: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._subject = subject
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._subject, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wait(
                lambda: attribute(
                    *map(_unwrapped, args), **{key: _unwrapped(v) for key, v in kwargs.items()}
                )
            )

        return call

    def __enter__(self) -> Blocking:
        self._wait(lambda: self._subject.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._wait(lambda: self._subject.__aexit__(*error))

    def pause(self) -> None:
        """Its event loop runs for a moment."""
        self._wait(lambda: asyncio.sleep(0.01))

    def _wait(self, start: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = start()
            if isinstance(result, OpeningSequence) or inspect.isawaitable(result):
                result = await result
            return result

        return self._wrapped(self._loop.run_until_complete(run()))

    def _wrapped(self, value: Any) -> Any:
        if isinstance(value, _TO_WRAP):
            return Blocking(value, self._loop)
        if isinstance(value, list):
            return [self._wrapped(entry) for entry in value]
        return value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Blocking):
        return value._subject
    if isinstance(value, list):
        return [_unwrapped(entry) for entry in value]
    return value


def until_meanwhile(client: Any, condition: Callable[[], object]) -> None:
    """`until`, while the event loop of an async client runs."""
    until(lambda: (isinstance(client, Blocking) and client.pause()) or condition())


def once_it_is_back(call: Callable[[], Any]) -> Any:
    """What a call gives once gRPC has connected to a daemon that was gone.

    It lets more and more time pass between two attempts, in all that the client repeats a call.
    """
    results: list[Any] = []

    def was_answered() -> bool:
        with suppress(UnavailableError):
            results.append(call())
        return bool(results)

    until(was_answered)
    return results[0]


def next_event(stream: Any) -> Any:
    """Of an event stream of either client."""
    return next(stream) if hasattr(type(stream), "__next__") else stream.__anext__()


@contextmanager
def open_client(kind: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """kind: "sync" or "async". Gives the methods of `Client` either way."""
    if kind == "sync":
        with Client(*args, **kwargs) as client:
            yield client
        return
    loop = asyncio.new_event_loop()

    async def make() -> AsyncClient:
        return AsyncClient(*args, **kwargs)

    try:
        with Blocking(loop.run_until_complete(make()), loop) as client:
            yield client
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
