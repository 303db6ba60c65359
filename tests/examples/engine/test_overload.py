"""More callers than an engine can serve, and callers that wait in vain, are told so in time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from starlette.requests import ClientDisconnect

from examples.engine.answering import Answering
from examples.engine.app import make_app
from examples.engine.openai_form import ApiError, Completions, ServedModel
from examples.engine.runner import TransformersRunner
from examples.engine.scheduler import Chunk, Limits
from prefixcache.client import Client
from prefixcache.errors import ExceedsPoolError, PrefixCacheError, QuotaExceededError
from tests.core.manager import Manager
from tests.examples.engine.endpoint import Endpoint, served
from tests.examples.engine.local_engine import VOCABULARY, LocalEngine
from tests.examples.engine.tiny_model import plain_answer
from tests.support.daemon import RunningDaemon

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = Limits(max_tokens_per_step=16, max_running=1, max_waiting=2)
LOCAL_MODEL = ServedModel("local", cast(Any, None), 64, VOCABULARY)
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No model computes anything before it is set."""
    gate = threading.Event()
    forward = TransformersRunner.forward

    def gated(self: TransformersRunner, chunks: Sequence[Chunk]) -> torch.Tensor:
        gate.wait()
        return forward(self, chunks)

    monkeypatch.setattr(TransformersRunner, "forward", gated)
    return gate


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_who_finds_the_queue_full_is_to_come_again(
    folder: Path, running: RunningDaemon, gate: threading.Event, path: str, is_stream: bool
) -> None:
    with (
        served(folder, running.target, LIMITS) as endpoint,
        ThreadPoolExecutor() as threads,
        ExitStack() as ends,
    ):
        ends.callback(gate.set)
        replies = [threads.submit(endpoint.complete, "one", max_tokens=5)]
        wait_until(lambda: num_running(endpoint) == 1)
        replies += [threads.submit(endpoint.complete, "one", max_tokens=5) for _ in range(2)]
        wait_until(lambda: num_waiting(endpoint) == 2)
        with endpoint.opened(path, {**BODIES[path], "stream": is_stream}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            error = json.loads(response.read())["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")

        gate.set()
        for reply in replies:
            assert reply.result()["choices"][0]["text"] == plain_answer("one", 5)
        assert endpoint.post(path, BODIES[path])[0] == 200


@pytest.mark.parametrize("num_choices", [1, 2])
def test_an_answer_that_takes_too_long_ends_and_is_freed(
    folder: Path, running: RunningDaemon, gate: threading.Event, num_choices: int
) -> None:
    body = {**BODIES[CHAT], "n": num_choices}
    with served(folder, running.target, timeout_s=0.2) as endpoint, ExitStack() as ends:
        ends.callback(gate.set)
        status, reply = endpoint.post(CHAT, body)
        assert (status, reply["error"]["code"]) == (504, "timeout")
        assert reply["error"]["type"] == "server_error"
        *_, last = endpoint.stream(CHAT, body)
        assert last["error"]["code"] == "timeout"

        gate.set()
        assert endpoint.engine is not None
        wait_until(lambda: endpoint.engine.scheduler.is_idle)  # type: ignore[union-attr]
        with Client(running.target) as client:
            assert client.stats().referenced == 0


@pytest.mark.parametrize(
    ("refusal", "status", "code", "may_retry"),
    [
        (QuotaExceededError(3, 0, 2), 429, "insufficient_quota", False),
        (ExceedsPoolError("token_ids", 3, 2), 400, None, False),
        (None, 503, None, True),
    ],
)
def test_what_the_daemon_refuses_has_a_status(
    refusal: PrefixCacheError | None, status: int, code: str | None, may_retry: bool
) -> None:
    local = LocalEngine(Manager(20))

    def refuse(*_: object, **__: object) -> None:
        assert refusal is not None
        raise refusal

    async def answer() -> None:
        ask = Completions(LOCAL_MODEL).parse({"prompt": [1, 2, 3]})
        with Answering(local.engine, ask, timeout_s=60) as answering:
            local.turn()
            async for _ in answering.deltas():
                pass

    if refusal is None:
        local.engine.close()
    local.cache.sequence = refuse  # type: ignore[method-assign]
    with pytest.raises(ApiError) as refused:
        asyncio.run(answer())
    assert (refused.value.status, refused.value.code) == (status, code)
    assert ("Retry-After" in refused.value.headers()) is may_retry


@pytest.mark.parametrize("asgi", ["2.3", "2.4"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_caller_that_is_gone_before_the_reply_begins_leaves_nothing(
    asgi: str, is_stream: bool
) -> None:
    """The server says so by a message, or from version 2.4 on by an error of the first `send`."""
    local = LocalEngine(Manager(20))
    app = make_app(local.engine, LOCAL_MODEL)
    body = json.dumps({"prompt": [1, 2, 3], "stream": is_stream}).encode()
    received = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: object) -> None:
        raise OSError

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": asgi},
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [],
        "query_string": b"",
    }
    with pytest.raises((OSError, ClientDisconnect, ExceptionGroup)):
        asyncio.run(app(scope, receive, send))
    local.turn()
    assert local.scheduler.is_idle
    assert local.runner.steps == []


def num_running(endpoint: Endpoint) -> int:
    assert endpoint.engine is not None
    return len(endpoint.engine.scheduler.running)


def num_waiting(endpoint: Endpoint) -> int:
    """As `/health` says."""
    return int(endpoint.get("/health")[1]["waiting"])


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
