"""A daemon in a process of its own that can be stopped, killed, started again and looked into."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache import Client, PoolStats
from prefixcache.errors import PrefixCacheError

CHECKED_DAEMON = "tests.chaos.checked_daemon"
GRACE_S = 0.5
BLOCK_SIZE, NUM_BLOCKS = 4, 96
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 8
COMMON = (
    *("--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)),
    *("--reconnect-grace", str(GRACE_S), "--log-format", "json", "--drain-timeout", "10"),
)
STORAGE = {
    "none": ("--storage", "none"),
    "cpu": (
        *("--storage", "cpu", "--num-layers", str(NUM_LAYERS), "--dtype", "float32"),
        *("--num-kv-heads", str(NUM_KV_HEADS), "--head-dim", str(HEAD_DIM), "--threads", "1"),
    ),
}
"""Flags by where K/V live."""
_ANY = {
    "--hash-algorithm": ("sha256_cbor", "xxhash_cbor", "xxh3"),
    "--max-workers": ("2", "16"),
}
"""Flags that a load must not depend on."""
_START_S = 60.0
_POLL_S = 0.02


def any_options(rng: random.Random) -> tuple[str, ...]:
    return tuple(part for flag, values in _ANY.items() for part in (flag, rng.choice(values)))


@dataclass(frozen=True)
class Usage:
    """What the operating system says of a process."""

    rss_bytes: int
    num_threads: int
    num_files: int


class DaemonProcess:
    """program: the module that is run, with the command line of `prefixcache`."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        program: str = CHECKED_DAEMON,
    ) -> None:
        self.target = f"unix:{folder}/daemon.sock"
        self.log = folder / "daemon.log"
        self._command = [sys.executable, "-m", program, "serve", "--listen", self.target]
        self._command += [*COMMON, *options]
        self._process: subprocess.Popen[str] | None = None
        self._boots = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once it serves."""
        environ = {key: value for key, value in os.environ.items() if "PREFIXCACHE_" not in key}
        if "PREFIXCACHE_CORE" in os.environ:
            environ["PREFIXCACHE_CORE"] = os.environ["PREFIXCACHE_CORE"]
        self._boots += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        until_s = time.monotonic() + _START_S
        while self.log.read_bytes().count(b'"serving"') < self._boots:
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the daemon did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(_POLL_S)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        assert self._process is not None
        self.signal(number)
        code = self._process.wait(_START_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def ask(self, command: str) -> Any:
        """See `checked_daemon`."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def stats(self) -> PoolStats:
        with Client(self.target) as client:
            return client.stats()

    def usage(self) -> Usage:
        folder = Path(f"/proc/{self.pid}")
        status = dict(
            line.split(":", 1) for line in (folder / "status").read_text("ascii").splitlines()
        )
        return Usage(
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
            num_threads=int(status["Threads"]),
            num_files=len(os.listdir(folder / "fd")),
        )

    def num_internal_errors(self) -> int:
        """Calls that a bug has ended, and what else the log calls an error but bad settings."""
        lines = self.log.read_bytes().splitlines()
        bad = (b'"level": "error"' in line or b"Traceback" in line for line in lines)
        return sum(bad) - sum(b'"reload refused' in line for line in lines)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.end(signal.SIGKILL)


@contextmanager
def daemon_process(
    folder: Path, storage: str, *options: str, program: str = CHECKED_DAEMON
) -> Iterator[DaemonProcess]:
    """Started. The folder, which must be the caller's alone, gets its socket and its log."""
    daemon = DaemonProcess(folder, (*STORAGE[storage], *options), program)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


def wait_until_free(daemon: DaemonProcess, timeout_s: float) -> tuple[PoolStats | None, float]:
    """Wait for all blocks to be free: the last statistics, and the seconds taken.

    None if the daemon does not answer.
    """
    begin_s = time.monotonic()
    stats = None
    try:
        with Client(daemon.target, timeout_s=timeout_s) as client:
            while True:
                stats = client.stats()
                taken_s = time.monotonic() - begin_s
                is_free = not (stats.sequences or stats.referenced or stats.quarantined)
                if is_free or taken_s > timeout_s:
                    return stats, taken_s
                time.sleep(_POLL_S)
    except PrefixCacheError:
        return stats, time.monotonic() - begin_s
