"""The daemon as a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

PROGRAM = [sys.executable, "-m", "prefixcache.cli"]
SEED = "a seed of some length"
MANAGER = ("--storage", "none", "--num-blocks", "100")
"""Options of a daemon that starts fast."""


class Process(subprocess.Popen[str]):
    """log: what the daemon has logged until it served. start: the last line of it."""

    log: list[dict[str, Any]]

    @property
    def start(self) -> dict[str, Any]:
        return self.log[-1]

    @property
    def addresses(self) -> list[str]:
        """Where it serves."""
        found: list[str] = self.start["addresses"]
        return found


@contextmanager
def serving(
    folder: Path,
    *options: str,
    seed: str = SEED,
    environ: Mapping[str, str] | None = None,
    file_limit: int | None = None,
) -> Iterator[Process]:
    """A daemon on the default socket of `folder`, once it serves; logs JSON lines to stderr.

    file_limit: its soft limit of open files; None for this process's.
    """
    inherited = {key: value for key, value in os.environ.items() if "PREFIXCACHE" not in key}
    own = {"XDG_RUNTIME_DIR": str(folder), "PREFIXCACHE_HASH_SEED": seed}
    limited = ["prlimit", f"--nofile={file_limit}:"] if file_limit is not None else []
    with Process(
        [*limited, *PROGRAM, "serve", *options],
        env={**inherited, **own, **(environ or {})},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            process.log = logged_until(process, "serving")
            yield process
        finally:
            process.kill()


def logged_until(process: subprocess.Popen[str], event: str) -> list[dict[str, Any]]:
    """What a daemon logs up to the line of that event; fails if it ends before."""
    assert process.stderr is not None
    lines: list[dict[str, Any]] = []
    for text in process.stderr:
        assert text.startswith("{"), text
        lines.append(json.loads(text))
        if lines[-1]["event"] == event:
            return lines
    raise AssertionError(f"the daemon has ended without {event!r}: {lines}")


def http_status(address: str, path: str) -> int:
    """Of a GET. address: `host:port`."""
    host, port = address.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", path)
    return connection.getresponse().status
