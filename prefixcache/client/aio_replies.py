"""The replies of a stream, for asyncio, and how it ended.

One task at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio

from prefixcache.client.cancelled_task import current_task_is_cancelled
from prefixcache.errors import CancelledCallError, PrefixCacheError, UnavailableError
from prefixcache.rpc.status import from_rpc_error

_LOOK_EVERY_S = 0.01
_SEND_FAILED = "Internal error from Core"
"""What gRPC says then, and only then."""


class Replies:
    """stream: a call of gRPC's asyncio side.

    When a send fails, gRPC says that the stream has ended with an internal error. It may have said
    before what the daemon said, and then keeps that no longer; or it will, and calls nobody.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # An iterator gives what came before the end, where `read` raises the error at once.
        self._messages = aiter(stream)
        self._error: PrefixCacheError | None = None
        stream.add_done_callback(self._look)

    async def next(self) -> Any:
        """Raises what the daemon ended the stream with, or CancelledCallError if this side did."""
        try:
            return await anext(self._messages)
        except (StopAsyncIteration, grpc.RpcError):
            error = await self._end()
        except asyncio.CancelledError:
            if current_task_is_cancelled():
                raise
            error = CancelledCallError("the stream is closed")
        raise error

    def cancel(self) -> None:
        self._stream.cancel()

    async def _end(self) -> PrefixCacheError:
        """For when there are no more replies."""
        while self._error is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._look(self._stream)
        return self._error

    def _look(self, stream: Any) -> None:
        if self._error is not None or not stream.done():
            return
        code, details = _now(stream.code()), _now(stream.details())
        if code is grpc.StatusCode.OK:
            self._error = UnavailableError("the daemon ended the stream")
        elif details != _SEND_FAILED:
            metadata = _now(stream.trailing_metadata())
            failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
            self._error = from_rpc_error(failure)


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, which it needs not wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")
