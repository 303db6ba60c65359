"""Starts a prefixcache daemon as another program does: by its command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixcache.client import Client
from prefixcache.errors import UnavailableError


class DaemonFailedError(Exception):
    """The daemon ended or did not answer in time; the message holds the end of its log."""


@contextmanager
def start_daemon(folder: Path, options: dict[str, str]) -> Iterator[str]:
    """Run `prefixcache serve` for as long as the block lasts; gives its address.

    `folder` holds its socket and its log. `options` are flags of `serve` and their values.
    """
    target = f"unix:{folder / 'daemon.sock'}"
    log = folder / "daemon.log"
    command = [sys.executable, "-m", "prefixcache.cli", "serve", "--listen", target]
    for flag, value in options.items():
        command += [flag, value]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(process, target, log)
        yield target
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(
    process: subprocess.Popen[bytes], target: str, log: Path, timeout_s: float = 60.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with Client(target) as client:
                client.server_info()
            return
        except UnavailableError:
            time.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:]
    raise DaemonFailedError(f"the daemon did not get ready (exit code {process.poll()}):\n{tail}")
