"""Processes that a benchmark needs beside its own: daemons, the echo, the makers of load.

A child ends with the block that started it: a daemon by SIGTERM, the others when their standard
input does, which is also when this process dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from prefixcache.client.channel import channel_options, resolve_address
from prefixcache.config.section import ENV_PREFIX
from prefixcache.core.form import FORM_ENV
from prefixcache.errors import UnavailableError

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.1


@contextmanager
def daemon_process(*flags: str) -> Iterator[str]:
    """A daemon on a Unix socket of its own, with these flags of `serve`; yields its address.

    Settings that stand in the environment do not count. Raises UnavailableError if it does not
    start.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{Path(folder) / 'prefixcache.sock'}"
        module = ["prefixcache.cli", "serve", "--listen", target, "--log-level", "error"]
        with _child([*module, "--drain-timeout", "1", *flags], by_signal=True) as process:
            wait_until_ready(target, process)
            yield target


@contextmanager
def echo_process(reply_sizes: Sequence[int], num_workers: int) -> Iterator[str]:
    """`prefixcache.bench.echo` on a Unix socket of its own; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{Path(folder) / 'echo.sock'}"
        sizes = ",".join(map(str, reply_sizes))
        with _child(["prefixcache.bench.echo", target, str(num_workers), sizes]) as process:
            wait_until_ready(target, process)
            yield target


class LoadProcess:
    """`prefixcache.bench.load`: another client, which calls without pause when it is told to."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @contextmanager
    def running(self) -> Iterator[list[int]]:
        """Calls go on in the block; after it the list holds how many there were."""
        done: list[int] = []
        self._send(b"g")
        yield done
        self._send(b"r")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError("the process that makes load has ended")
        done.append(int(line))

    def _send(self, command: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command)
        self._process.stdin.flush()


@contextmanager
def load_process(target: str, kind: str, num_tokens: int) -> Iterator[LoadProcess]:
    """kind: `lookup` or `prefill`, of so many tokens."""
    with _child(["prefixcache.bench.load", target, kind, str(num_tokens)]) as process:
        yield LoadProcess(process)


@contextmanager
def _child(module: list[str], *, by_signal: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENV_PREFIX) or name == FORM_ENV
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if by_signal:
            process.terminate()
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def wait_until_ready(target: str, process: subprocess.Popen[bytes]) -> None:
    """Until it takes connections. Raises UnavailableError if it ends first, or takes too long."""
    with grpc.insecure_channel(resolve_address(target).target, channel_options()) as channel:
        ready = grpc.channel_ready_future(channel)
        for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
            try:
                ready.result(timeout=_POLL_S)
                return
            except grpc.FutureTimeoutError:
                if process.poll() is not None:
                    break
    raise UnavailableError(f"{' '.join(map(str, process.args[2:4]))} did not start")  # type: ignore[index]
