"""The engine's HTTP endpoint: /v1/completions, /v1/chat/completions, /v1/models, /health.

What a caller has asked for ends with its connection. Runs in uvicorn's event loop; the engine has a
thread of its own.
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
from starlette.types import Receive, Scope, Send

from examples.engine.answering import Answering
from examples.engine.loop import Engine
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

DEFAULT_TIMEOUT_S = 600.0
"""That of OpenAI's own clients."""
MAX_BODY_BYTES = 16 * 2**20


def make_app(engine: Engine, model: ServedModel, timeout_s: float = DEFAULT_TIMEOUT_S) -> Starlette:
    """The engine runs from the application's start to its end. timeout_s: for a whole answer."""

    async def completions(http: HttpRequest) -> Response:
        return await _answer(engine, Completions(model), http, timeout_s)

    async def chat(http: HttpRequest) -> Response:
        return await _answer(engine, Chat(model), http, timeout_s)

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
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
        lifespan=lifespan,
    )


def _health(engine: Engine) -> Response:
    scheduler = engine.scheduler
    body = {
        "status": "ok" if engine.is_running else "stopped",
        "running": len(scheduler.running),
        "waiting": engine.num_waiting,
        "preempted": scheduler.num_preempted,
        **asdict(engine.counters),
    }
    return JSONResponse(body, 200 if engine.is_running else 503)


async def _answer(engine: Engine, form: Form, http: HttpRequest, timeout_s: float) -> Response:
    ask = form.parse(await _body(http))
    answering = Answering(engine, ask, timeout_s)
    if ask.is_stream:
        return _Events(ask, answering)
    with answering:
        return await _unless_gone(http, _whole_reply(ask, answering))


async def _body(http: HttpRequest) -> Any:
    """Raises ApiError for what is no JSON, or no Unicode."""
    received = bytearray()
    async for part in http.stream():
        received += part
        if len(received) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(received)
        _json(body).encode()  # JSON may name halves of characters
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    return body


async def _whole_reply(ask: Ask, answering: Answering) -> Response:
    usage = Usage(ask.questions)
    choices = [Choice(index) for index in range(ask.num_choices)]
    async for delta in answering.deltas():
        choices[delta.index].add(delta)
        usage.add(delta)
    return JSONResponse(ask.form.reply(choices, usage))


class _Events(StreamingResponse):
    """The answer as server-sent events, which end with the connection."""

    def __init__(self, ask: Ask, answering: Answering) -> None:
        super().__init__(_events(ask, answering), media_type="text/event-stream")
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in `_events`: one that has not begun to run does not come to its end.
        with self._answering:
            await super().__call__(scope, receive, send)


async def _events(ask: Ask, answering: Answering) -> AsyncIterator[str]:
    """What fails in the middle is an event too."""
    usage = Usage(ask.questions)
    for chunk in ask.form.first_chunks(ask.num_choices):
        yield _event(chunk)
    try:
        async for delta in answering.deltas():
            usage.add(delta)
            if delta.text or delta.is_last:
                yield _event(ask.form.chunk(delta))
        if ask.wants_usage:
            yield _event(ask.form.usage_chunk(usage))
    except ApiError as error:
        yield _event(error.body())
    yield "data: [DONE]\n\n"


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


def _event(body: dict[str, Any]) -> str:
    return f"data: {_json(body)}\n\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, error.detail).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _internal_error(_: HttpRequest, error: Exception) -> Response:
    """A defect, which goes to the log."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
