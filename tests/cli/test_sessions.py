"""Sessions between processes: clients that are killed, stopped or forgotten, and a daemon that
comes back. Real signals; the only times that count are those of the daemon's own settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcache.client import Client
from tests.support.program import serving
from tests.support.waiting import until

NUM_BLOCKS = 10
GRACE_S = 0.5
TTL_S = 4.0
"""Short, where its end is waited for. A living client must be heard within it on a busy machine."""
OPTIONS = ["--storage", "none", "--num-blocks", str(NUM_BLOCKS), "--block-size", "4"]

PROGRAM = """
import sys
from prefixcache import Client
from prefixcache.errors import PrefixCacheError

client = Client(sys.argv[1], session_ttl_s=float(sys.argv[2]), client_name="the other process")
sequence = client.sequence(range(10))
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line)
    except PrefixCacheError as error:
        print(type(error).__name__, error.fields.get("cause", ""), flush=True)
    else:
        print("done", flush=True)
"""
ASYNC_PROGRAM = """
import asyncio, sys
from prefixcache import AsyncClient

async def main():
    client = AsyncClient(sys.argv[1], session_ttl_s=float(sys.argv[2]))
    sequence = await client.sequence(range(10))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


class Other:
    """A client in a process of its own, which runs the lines that it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def other_process(target: str, ttl_s: float, program: str = PROGRAM) -> Iterator[Other]:
    command = [sys.executable, "-c", program, target, str(ttl_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            other = Other(process)
            assert other.read() == "ready"
            yield other
        finally:
            process.kill()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path, *OPTIONS, "--reconnect-grace", str(GRACE_S)):
        yield f"unix:{tmp_path}/prefixcache.sock"


@pytest.mark.parametrize("program", [PROGRAM, ASYNC_PROGRAM], ids=["threads", "asyncio"])
def test_what_a_killed_client_held_is_freed_long_before_its_ttl(target: str, program: str) -> None:
    with Client(target) as watching, other_process(target, 3600.0, program) as other:
        stats = watching.stats()
        assert (stats.sessions, stats.sequences, stats.referenced) == (1, 1, 3)
        other.process.kill()
        until(lambda: watching.stats().sequences == 0)
        stats = watching.stats()
        assert (stats.sessions, stats.referenced, stats.expired_sessions) == (0, 0, 1)


def test_a_client_that_was_stopped_beyond_its_ttl_can_write_nowhere(target: str) -> None:
    with Client(target) as client, other_process(target, TTL_S) as other:
        other.process.send_signal(signal.SIGSTOP)
        until(lambda: client.stats().sessions == 0)
        # All blocks have another owner now.
        with client.sequence(range(100, 100 + NUM_BLOCKS * 4)) as taker:
            table = taker.block_ids.tolist()
            before = client.stats(), client.list_sequences()[0].num_tokens
            other.process.send_signal(signal.SIGCONT)
            for line in (
                "sequence.append([1])",
                "sequence.commit(10)",
                "sequence.truncate(5)",
                "client.append([sequence], [[1]])",
            ):
                assert other.run(line).startswith("SessionLostError")
            assert other.run("sequence.free()") == "done"
            assert (client.stats(), client.list_sequences()[0].num_tokens) == before
            assert sorted(table) == list(range(NUM_BLOCKS))
        # The same client begins anew.
        assert other.run("sequence = client.sequence(range(10)); sequence.append([1])") == "done"
        assert client.stats().sessions == 2


def test_a_daemon_that_was_restarted_is_noticed_by_its_boot_id(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/prefixcache.sock"
    with serving(tmp_path, *OPTIONS) as first:
        processes = other_process(target, 60.0)
        other = processes.__enter__()
        first.kill()
        first.wait()
    try:
        with serving(tmp_path, *OPTIONS), Client(target) as client:
            until(lambda: other.run("client.lookup([1])") == "done")  # it has reconnected
            assert other.run("sequence.append([1])") == "SessionLostError the daemon was restarted"
            assert client.stats().sequences == 0
            assert other.run("sequence = client.sequence(range(4)); sequence.commit(4)") == "done"
            assert client.stats().sequences == 1
    finally:
        processes.__exit__(None, None, None)


def test_a_process_that_forgets_to_close_ends_promptly_and_holds_nothing(target: str) -> None:
    with Client(target) as client, other_process(target, 3600.0) as other:
        assert other.process.stdin is not None
        other.process.stdin.close()
        assert other.process.wait(timeout=60) == 0
        until(lambda: client.stats().sequences == 0)


def test_a_stopped_daemon_ends_promptly_though_sessions_are_open(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/prefixcache.sock"
    with (
        serving(tmp_path, *OPTIONS, "--drain-timeout", "600") as daemon,
        other_process(target, 60.0) as other,
    ):
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 0
        assert other.run("client.close()") == "done"


def test_a_daemon_that_stood_still_ends_no_session_of_a_living_client(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/prefixcache.sock"
    with serving(tmp_path, *OPTIONS) as daemon, other_process(target, TTL_S) as other:
        assert other.run("sequence.append([1])") == "done"
        daemon.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(timeout=TTL_S + 2.0)
        os.kill(daemon.pid, signal.SIGCONT)
        assert other.run("sequence.append([1])") == "done"
