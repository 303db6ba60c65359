"""One HTTP request at the engine: from its questions to the last delta of all choices.

Owns the caller. However the request ends, with its answer, by an error, in time or not, or as the
connection is gone, `close` leaves the engine with nothing of it. Runs in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self

from examples.engine.loop import Engine, EngineFullError, EngineStoppedError
from examples.engine.openai_form import ApiError, Ask
from examples.engine.request import Caller, Delta, Request
from prefixcache.errors import InvalidArgumentError, PrefixCacheError, QuotaExceededError

RETRY_AFTER_S = 1


class Answering:
    """timeout_s: for the whole answer, waiting included. Raises ApiError if nobody will answer."""

    def __init__(self, engine: Engine, ask: Ask, timeout_s: float) -> None:
        event_loop = asyncio.get_running_loop()
        self._engine = engine
        self._arrived: asyncio.Queue[Delta] = asyncio.Queue()
        self._num_left = ask.num_choices

        def tell(delta: Delta) -> None:
            event_loop.call_soon_threadsafe(self._arrived.put_nowait, delta)

        self._caller = Caller(tell)
        requests = [
            Request.of(question, self._caller, number * question.num_choices)
            for number, question in enumerate(ask.questions)
        ]
        try:
            engine.submit(requests)
        except (EngineFullError, EngineStoppedError) as error:
            raise _in_openai_form(error) from error
        late = ApiError(504, f"there is no whole answer after {timeout_s:g} s", code="timeout")
        self._timer = event_loop.call_later(
            timeout_s, self._arrived.put_nowait, Delta(0, error=late)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The engine frees what is left. May be called again."""
        self._timer.cancel()
        self._caller.is_gone = True
        self._engine.wake()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Of all choices, as they come. Raises ApiError."""
        while self._num_left:
            delta = await self._arrived.get()
            if delta.error is not None:
                raise _in_openai_form(delta.error) from delta.error
            self._num_left -= delta.is_last
            yield delta


def _in_openai_form(error: Exception) -> ApiError:
    """Raises what is no refusal, as it is."""
    match error:
        case ApiError():
            return error
        case InvalidArgumentError():
            return ApiError(400, error.message)
        case QuotaExceededError():  # of more than the quota's whole: no wait helps
            return ApiError(429, str(error), code="insufficient_quota")
        case EngineFullError():
            return ApiError(
                429, str(error), code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S
            )
        case EngineStoppedError() | PrefixCacheError():
            return ApiError(503, str(error), retry_after_s=RETRY_AFTER_S)
    raise error
