"""Engines as processes of their own, and their callers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any


class EngineFailedError(Exception):
    """An engine has ended, or refused a request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """duration_s: from the request to the whole answer."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    duration_s: float


class EngineProcess:
    """An engine at a free port, ready when made. options: flags of `python -m examples.engine`."""

    def __init__(self, model: Path, target: str, *options: str) -> None:
        command = [sys.executable, "-m", "examples.engine", "--model", str(model)]
        command += ["--target", target, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("serving "):
            raise EngineFailedError(f"an engine ended with exit code {self.process.wait()}")
        self._address = line.rstrip().removesuffix("/v1").rpartition("http://")[2]

    def complete(self, prompt: str, max_tokens: int) -> Reply:
        """A greedy completion. Raises EngineFailedError."""
        started = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        reply = self._call("POST", "/v1/completions", json.dumps(body))
        usage = reply["usage"]
        return Reply(
            text=reply["choices"][0]["text"],
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_output_tokens=usage["completion_tokens"],
            duration_s=time.perf_counter() - started,
        )

    def health(self) -> dict[str, Any]:
        """What it has counted since its start."""
        counted: dict[str, Any] = self._call("GET", "/health", None)
        return counted

    def kill(self) -> None:
        """As when it is out of memory: it has no chance to free anything."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()

    def _call(self, method: str, path: str, body: str | None) -> Any:
        connection = HTTPConnection(self._address, timeout=600)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            reply = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise EngineFailedError(f"{method} {path}: {response.status} {reply}")
        return reply


@contextmanager
def engines(model: Path, targets: list[str], *options: str) -> Iterator[list[EngineProcess]]:
    """One for each target, all ready. The list may be changed; what is in it at the end is stopped.

    They start at the same time, since each has a model to load.
    """
    started = [EngineProcess(model, target, *options) for target in targets]
    try:
        for engine in started:
            engine.wait_until_ready()
        yield started
    finally:
        for engine in started:
            engine.stop()
