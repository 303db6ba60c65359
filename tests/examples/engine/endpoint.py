"""The engine's endpoint, called over HTTP as any program would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from examples.engine.__main__ import listen
from examples.engine.app import make_app
from examples.engine.loop import Engine
from examples.engine.openai_form import ServedModel
from examples.engine.runner import TransformersRunner, TransformersTokenizer, load
from examples.engine.scheduler import Limits, Scheduler
from prefixcache.client import Client
from prefixcache.integrations.transformers import (
    kv_layout,
    own_stop_token_ids,
    weights_revision,
)
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.types import PoolAccess
from tests.support.daemon import RunningDaemon, running_daemon

BLOCK_SIZE = 4
MODEL_NAME = "tiny"


@dataclass(frozen=True)
class Endpoint:
    port: int
    engine: Engine | None = None
    """None for one in another process."""

    def get(self, path: str) -> tuple[int, Any]:
        return self._reply("GET", path, None)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """body: JSON, or bytes as they are."""
        return self._reply("POST", path, body)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """A greedy completion's reply, which must succeed."""
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, **fields}
        status, reply = self.post("/v1/completions", body)
        assert status == 200, reply
        return reply

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The events of an answer, up to the last one before [DONE]."""
        with self.opened(path, {**body, "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.strip():
                    yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream ended without [DONE]")

    @contextmanager
    def opened(self, path: str, body: Any) -> Iterator[HTTPResponse]:
        """A reply that has begun; its connection ends with the block."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def _reply(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data)
        response = connection.getresponse()
        reply = json.loads(response.read())
        connection.close()
        return response.status, reply


@contextmanager
def daemon_for(folder: Path, num_blocks: int = 200) -> Iterator[RunningDaemon]:
    model, _ = load(str(folder))
    model_options = ModelOptions(kv_layout(model, BLOCK_SIZE), revision=weights_revision(model))
    cache = CacheOptions(num_blocks, BLOCK_SIZE)
    with running_daemon(cache, model_options, attach=PoolAccess.WRITE) as running:
        yield running


@contextmanager
def served(
    folder: Path, target: str, limits: Limits | None = None, timeout_s: float = 60.0
) -> Iterator[Endpoint]:
    """An engine on that daemon, in this process."""
    model, tokenizer = load(str(folder))
    text = TransformersTokenizer(tokenizer)
    limits = limits or Limits(max_tokens_per_step=16, max_running=8)
    with (
        Client(target) as client,
        closing(TransformersRunner(model, client, attached=True)) as runner,
    ):
        engine = Engine(Scheduler(client, limits), runner, text.decode, own_stop_token_ids(model))
        config = model.config
        served_model = ServedModel(
            MODEL_NAME, text, config.max_position_embeddings, config.vocab_size
        )
        with serving(make_app(engine, served_model, timeout_s), engine) as endpoint:
            yield endpoint


@contextmanager
def serving(app: Starlette, engine: Engine) -> Iterator[Endpoint]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Endpoint(listening.getsockname()[1], engine)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
