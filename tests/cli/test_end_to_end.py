"""A daemon and the commands that ask it, all as programs of their own."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import prefixcache
from prefixcache.client import Client
from prefixcache.errors import CancelledCallError, PrefixCacheError, UnavailableError
from prefixcache.types import ResultCode
from tests.support.program import PROGRAM, SEED, http_status, logged_until, serving
from tests.support.waiting import until

TRACE = "\n".join(
    json.dumps({"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": hash_ids})
    for hash_ids in ([1, 2], [1, 3], [1, 2])
)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with serving(
        tmp_path, "--storage", "none", "--num-blocks", "100", "--drain-timeout", "600"
    ) as process:
        yield process


@pytest.fixture
def target(daemon: subprocess.Popen[str], tmp_path: Path) -> str:
    return f"unix:{tmp_path}/prefixcache.sock"


def test_every_command_works_against_a_running_daemon(
    daemon: subprocess.Popen[str], target: str, tmp_path: Path
) -> None:
    assert stat.S_IMODE((tmp_path / "prefixcache.sock").stat().st_mode) == 0o660
    info = json.loads(run("info", "--json", "--target", target))
    assert (info["num_blocks"], info["block_size"], info["device"]) == (100, 16, "none")
    assert info["version"] == prefixcache.__version__
    assert info["hash_seeded"] is True

    tokens = [str(token) for token in range(40)]
    with Client(target) as client, client.sequence(range(40)) as sequence:
        sequence.commit(40)
    found = json.loads(run("lookup", *tokens, "--json", "--hashes", "--target", target))
    assert found["num_cached_tokens"] == 32
    assert found["num_blocks_free"] == 100
    assert [len(digest) for digest in found["block_hashes"]] == [64, 64]
    salted = json.loads(run("lookup", *tokens, "--json", "--salt", "s", "--target", target))
    assert salted["num_cached_tokens"] == 0

    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    options = ["--trace-block", "16", "--reset", "--json", "--target", target]
    row = json.loads(run("replay", str(trace), *options))
    assert (row["requests"], row["query_blocks"], row["hit_blocks"]) == (3, 6, 3)

    stats = json.loads(run("stats", "--json", "--target", target))
    assert stats["requests"] == 1 + 3
    assert stats["referenced"] + stats["evictable"] + stats["blank"] == 100
    assert "hit rate" in run("stats", "--target", target)


def test_watch_ends_with_0_on_control_c(daemon: subprocess.Popen[str], target: str) -> None:
    command = [*PROGRAM, "stats", "--watch", "0.05", "--json", "--target", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=60) == 0
    assert lines[0]["rates_per_s"] is None
    assert lines[1]["rates_per_s"]["requests"] == 0.0


def test_a_second_daemon_on_the_same_socket_is_refused_as_usage(
    daemon: subprocess.Popen[str], target: str
) -> None:
    command = [*PROGRAM, "serve", "--storage", "none", "--num-blocks", "1", "--listen", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert str(daemon.pid) in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_the_daemon_with_0_and_removes_the_socket(
    daemon: subprocess.Popen[str], tmp_path: Path, target: str
) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout=60) == 0
    assert not (tmp_path / "prefixcache.sock").exists()


def test_sigterm_ends_the_daemon_with_0_though_streams_are_open(
    daemon: subprocess.Popen[str], target: str
) -> None:
    with Client(target) as client, client.steps() as idle, client.steps() as busy:
        for steps in (idle, busy):
            steps.run(steps.new_step())
        unanswered = [busy.new_step() for _ in range(20)]
        for number, step in enumerate(unanswered):
            step.sequence([number])
            busy.send(step)
        daemon.send_signal(signal.SIGTERM)
        # Far less than the drain timeout.
        assert daemon.wait(timeout=60) == 0
        for steps in (idle, busy):
            with pytest.raises(UnavailableError):
                while True:
                    steps.run(steps.new_step())


def test_sigterm_ends_the_daemon_with_0_though_calls_wait_for_anothers_blocks(
    daemon: subprocess.Popen[str], target: str
) -> None:
    with Client(target, timeout_s=60.0) as client, ThreadPoolExecutor(4) as threads:
        client.sequence(range(100))
        calls = [threads.submit(client.sequence, range(100), wait_pending_s=50.0) for _ in range(4)]
        daemon.send_signal(signal.SIGTERM)
        # Less than the wait, and far less than the drain timeout.
        assert daemon.wait(timeout=40) == 0
        for call in calls:
            # gRPC cancels one that arrives in the moment of the stop.
            with pytest.raises((UnavailableError, CancelledCallError)):
                call.result(timeout=30)


def test_a_daemon_that_is_killed_fails_the_steps_that_it_had(
    daemon: subprocess.Popen[str], target: str
) -> None:
    with Client(target) as client, client.steps() as steps:
        steps.run(steps.new_step())
        daemon.send_signal(signal.SIGSTOP)
        step = steps.new_step()
        pending = step.sequence([1])
        steps.send(step)
        daemon.kill()
        with pytest.raises(UnavailableError):
            steps.wait(step)
        with pytest.raises(UnavailableError):
            pending.result()


@contextmanager
def attending(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A daemon and a Prefill that it works on for much longer than a test lasts."""
    layout = ["--num-layers", "1", "--num-kv-heads", "1", "--head-dim", "128", "--dtype", "float32"]
    storage = ["--storage", "cpu", "--num-blocks", "2100", "--threads", "1"]
    num_tokens = 2**15
    q, kv = (np.ones((num_tokens, heads, 128), dtype=np.float32) for heads in (8, 1))
    with (
        serving(folder, *storage, *layout, *options) as daemon,
        Client(f"unix:{folder}/prefixcache.sock", timeout_s=300) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        sequence = client.sequence(range(num_tokens))
        running = thread.submit(sequence.prefill, 0, q, kv, kv)
        while client.append([sequence], [[]])[0].code is not ResultCode.BUSY:
            assert not running.done()
        yield daemon
        assert isinstance(running.exception(timeout=60), PrefixCacheError)


def test_a_call_that_outlasts_the_drain_timeout_is_cut_and_the_daemon_ends(tmp_path: Path) -> None:
    with attending(tmp_path, "--drain-timeout", "0.1") as daemon:
        daemon.send_signal(signal.SIGTERM)
        assert logged_until(daemon, "stopped")[-1]["calls_cut"]
        assert daemon.wait(timeout=60) == 0
        assert not (tmp_path / "prefixcache.sock").exists()


def test_a_daemon_that_drains_is_alive_and_not_ready(tmp_path: Path) -> None:
    with attending(tmp_path, "--metrics-listen", "127.0.0.1:0") as daemon:
        metrics = logged_until(daemon, "serving metrics")[-1]["address"]
        assert http_status(metrics, "/readyz") == 200
        daemon.send_signal(signal.SIGTERM)
        logged_until(daemon, "stopping")
        until(lambda: http_status(metrics, "/readyz") == 503)
        assert http_status(metrics, "/healthz") == 200
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_second_signal_ends_the_daemon_at_once(tmp_path: Path) -> None:
    """It does not wait for running calls, and the next daemon takes its socket over."""
    with attending(tmp_path) as daemon:
        assert daemon.stderr is not None
        daemon.send_signal(signal.SIGTERM)
        assert any("stopping" in line for line in daemon.stderr)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 128 + signal.SIGTERM
    with serving(tmp_path, "--storage", "none", "--num-blocks", "1"):
        target = f"unix:{tmp_path}/prefixcache.sock"
        assert json.loads(run("info", "--json", "--target", target))["num_blocks"] == 1


@pytest.mark.parametrize("attempt", range(3))
def test_two_signals_at_the_same_moment_end_the_daemon(
    daemon: subprocess.Popen[str], attempt: int
) -> None:
    """A terminal and a supervisor may both send one; each handler interrupts the other."""
    daemon.send_signal(signal.SIGTERM)
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait(timeout=60) in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a_signal_to_a_stopped_daemon_ends_it_when_it_goes_on(
    daemon: subprocess.Popen[str],
) -> None:
    """The kernel may give it to any thread then."""
    daemon.send_signal(signal.SIGSTOP)
    daemon.send_signal(signal.SIGTERM)
    daemon.send_signal(signal.SIGCONT)
    assert daemon.wait(timeout=60) == 0


def test_a_daemon_without_a_seed_logs_that_its_hashes_are_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, "--storage", "none", "--num-blocks", "1", seed="") as daemon:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.stderr is not None
        log = daemon.stderr.read()
        assert daemon.wait(timeout=60) == 0
    assert "--hash-seed" in log


def test_the_seed_is_in_no_line_of_the_log(daemon: subprocess.Popen[str]) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.stderr is not None
    log = daemon.stderr.read()
    assert daemon.wait(timeout=60) == 0
    assert "stopped" in log
    assert SEED not in log
    assert "--hash-seed" not in log
