"""Consumers of vLLM's events that nobody here wrote, fed by the ZeroMQ publisher (make routers).

The indexer of NVIDIA's Dynamo (the wheel `ai-dynamo-runtime`) follows a daemon over ZeroMQ and must
then find for every prompt what Lookup finds. vLLM's own classes decode each message, where vLLM can
be imported.
"""

from __future__ import annotations

import importlib.util
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from prefixcache import BlocksStored, Client, SnapshotEnded
from tests.server.zmq_subscriber import Subscriber
from tests.support.program import MANAGER, logged_until, serving
from tests.support.waiting import until

pytestmark = pytest.mark.routers

ZMQ = ("--events-zmq", "tcp://127.0.0.1:0", "--events-zmq-replay", "tcp://127.0.0.1:0")
BLOCK_SIZE = 16


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_dynamo = pytest.mark.skipif(not is_there("dynamo.indexer"), reason="no ai-dynamo-runtime")
needs_vllm = pytest.mark.skipif(not is_there("vllm.distributed"), reason="no vllm")


def prompts(count: int) -> list[list[int]]:
    """Of which most continue the start of an earlier one."""
    rng = random.Random(7)
    made: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if made and rng.random() < 0.6:
            earlier = rng.choice(made)
            start = earlier[: rng.randrange(len(earlier))]
        made.append(start + [rng.randrange(50_000) for _ in range(rng.randrange(1, 200))])
    return made


def fill(client: Client, prompt: list[int]) -> None:
    with client.sequence(prompt) as sequence:
        sequence.commit(len(prompt) - sequence.num_cached_tokens)


def cached_hashes(client: Client) -> set[int]:
    """Of the index, as vLLM's events spell them."""
    found: set[int] = set()
    with client.watch_events() as stream:
        for event in stream:
            if isinstance(event, SnapshotEnded):
                return found
            if isinstance(event, BlocksStored):
                found |= {int.from_bytes(digest[-8:], "big") for digest in event.block_hashes}
    raise AssertionError("the snapshot has no end")


class Indexer:
    """Dynamo's standalone indexer, over HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port

    def is_up(self) -> bool:
        try:
            return self._ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def hashes(self) -> set[int]:
        """Of all blocks that it believes to be cached."""
        status, dumped = self._ask("GET", "/dump")
        assert status == 200
        return {
            block["block_hash"]
            for event in next(iter(json.loads(dumped).values()))["events"]
            for block in event["event"]["data"]["stored"]["blocks"]
        }

    def num_cached_tokens(self, prompt: list[int]) -> int:
        status, found = self._ask("POST", "/query", {"token_ids": prompt, "model_name": "default"})
        assert status == 200
        by_rank = json.loads(found)["scores"].get("1", {})
        return int(by_rank.get("0", 0))

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


@contextmanager
def indexing(publisher: str) -> Iterator[Indexer]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK_SIZE)]
    command += ["--port", str(port), "--threads", "1", "--workers", f"1={publisher}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            indexer = Indexer(port)
            until(indexer.is_up)
            yield indexer
        finally:
            process.kill()


@needs_dynamo
def test_dynamos_indexer_finds_what_lookup_finds(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *ZMQ) as daemon, Client(daemon.addresses[0]) as client:
        publisher = logged_until(daemon, "publishing events")[-1]["address"]
        with indexing(publisher) as indexer:

            def follows() -> bool:
                """A subscription takes a while to reach its publisher."""
                client.reset_cache()
                fill(client, [1] * BLOCK_SIZE)
                return bool(indexer.hashes())

            until(follows)
            client.reset_cache()
            asked = prompts(80)
            for prompt in asked:
                fill(client, prompt)
            assert client.stats().evictions > 50
            until(lambda: indexer.hashes() == cached_hashes(client))
            for prompt in asked:
                looked = client.lookup(prompt).num_cached_blocks
                assert indexer.num_cached_tokens(prompt) == looked * BLOCK_SIZE
            client.reset_cache()
            until(lambda: not indexer.hashes())


@needs_vllm
def test_vllms_classes_decode_every_message(tmp_path: Path) -> None:
    import msgspec
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    encoder = msgspec.msgpack.Encoder()
    kinds: set[type[Any]] = set()
    known: set[int] = set()
    with serving(tmp_path, *MANAGER, *ZMQ) as daemon, Client(daemon.addresses[0]) as client:
        line = logged_until(daemon, "publishing events")[-1]
        for prompt in prompts(80):
            fill(client, prompt)
        client.reset_cache()
        for prompt in prompts(10):
            fill(client, prompt)
        with Subscriber(line["address"]) as subscriber:
            messages = subscriber.replay(line["replay_address"], 0)
        for _, _, payload in messages:
            batch = decoder.decode(payload)
            assert msgspec.msgpack.decode(encoder.encode(batch)) == msgspec.msgpack.decode(payload)
            for event in batch.events:
                kinds.add(type(event))
                if isinstance(event, BlockStored):
                    known |= set(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    known -= set(event.block_hashes)
                else:
                    known.clear()
        assert known == cached_hashes(client)
    assert kinds == {AllBlocksCleared, BlockRemoved, BlockStored}
