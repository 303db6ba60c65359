"""The engine's HTTP endpoint: /v1/completions, /v1/chat/completions, /v1/models, /health.

Owns the callers: one whose connection ends is gone, and the engine frees what it holds. Runs in
uvicorn's event loop; the engine has a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.engine.loop import Engine, EngineStoppedError
from examples.engine.openai_form import (
    ApiError,
    Ask,
    Chat,
    Choice,
    Completions,
    Form,
    ServedModel,
    Usage,
)
from examples.engine.request import Caller, Delta, Request
from prefixcache.errors import InvalidArgumentError, PrefixCacheError


def make_app(engine: Engine, model: ServedModel) -> Starlette:
    """The engine runs from the application's start to its end."""

    async def completions(http: HttpRequest) -> Response:
        return await _answer(engine, Completions(model), http)

    async def chat(http: HttpRequest) -> Response:
        return await _answer(engine, Chat(model), http)

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model.card()]})

    async def one_model(http: HttpRequest) -> Response:
        if (name := http.path_params["name"]) != model.name:
            raise ApiError(404, f"there is no model {name!r}", "model", "model_not_found")
        return JSONResponse(model.card())

    async def health(_: HttpRequest) -> Response:
        return _health(engine)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )


def _health(engine: Engine) -> Response:
    scheduler = engine.scheduler
    body = {
        "status": "ok" if engine.is_running else "stopped",
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "preempted": scheduler.num_preempted,
        **asdict(engine.counters),
    }
    return JSONResponse(body, 200 if engine.is_running else 503)


async def _answer(engine: Engine, form: Form, http: HttpRequest) -> Response:
    try:
        body = await http.json()
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    ask = form.parse(body)
    if ask.is_stream:
        # StreamingResponse ends its iterator when the connection ends.
        return StreamingResponse(_events(engine, ask), media_type="text/event-stream")
    return await _unless_gone(http, _whole_reply(engine, ask))


async def _whole_reply(engine: Engine, ask: Ask) -> Response:
    usage = Usage(ask.questions)
    choices = [Choice(index) for index in range(_num_choices(ask))]
    async for delta in _deltas(engine, ask):
        choices[delta.index].add(delta)
        usage.add(delta)
    return JSONResponse(ask.form.reply(choices, usage))


async def _events(engine: Engine, ask: Ask) -> AsyncIterator[str]:
    """The answer as server-sent events. What fails in the middle is an event too."""
    usage = Usage(ask.questions)
    for chunk in ask.form.first_chunks(_num_choices(ask)):
        yield _event(chunk)
    try:
        async for delta in _deltas(engine, ask):
            usage.add(delta)
            if delta.text or delta.is_last:
                yield _event(ask.form.chunk(delta))
        if ask.wants_usage:
            yield _event(ask.form.usage_chunk(usage))
    except ApiError as error:
        yield _event(error.body())
    yield "data: [DONE]\n\n"


async def _deltas(engine: Engine, ask: Ask) -> AsyncIterator[Delta]:
    """All deltas of all choices; however it ends, the engine is left with nothing of it.

    Raises ApiError.
    """
    arrived: asyncio.Queue[Delta] = asyncio.Queue()
    event_loop = asyncio.get_running_loop()

    def tell(delta: Delta) -> None:
        event_loop.call_soon_threadsafe(arrived.put_nowait, delta)

    caller = Caller(tell)
    num_choices = ask.questions[0].num_choices
    requests = [
        Request.of(question, caller, number * num_choices)
        for number, question in enumerate(ask.questions)
    ]
    try:
        engine.submit(requests)
        num_left = _num_choices(ask)
        while num_left:
            delta = await arrived.get()
            if delta.error is not None:
                raise delta.error
            num_left -= delta.is_last
            yield delta
    except InvalidArgumentError as error:
        raise ApiError(400, error.message) from error
    except (EngineStoppedError, PrefixCacheError) as error:
        raise ApiError(503, str(error)) from error
    finally:
        caller.is_gone = True
        engine.wake()


async def _unless_gone(http: HttpRequest, reply: Coroutine[Any, Any, Response]) -> Response:
    """The reply; if the connection ends before, the making of it ends."""
    making = asyncio.create_task(reply)
    watching = asyncio.create_task(_until_gone(http))
    try:
        await asyncio.wait({making, watching}, return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            return making.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        making.cancel()
        watching.cancel()


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _num_choices(ask: Ask) -> int:
    return sum(question.num_choices for question in ask.questions)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(ApiError(error.status_code, error.detail).body(), error.status_code)
