"""`serve --event-buffer`, `prefixcache events`, `serve --events-zmq`: real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcache import Client
from tests.server.zmq_subscriber import Subscriber
from tests.support.program import MANAGER, PROGRAM, Process, logged_until, serving

BUFFER = (*MANAGER, "--event-buffer", "1MiB")


def fill(client: Client, num_tokens: int) -> None:
    with client.sequence(list(range(num_tokens))) as sequence:
        sequence.commit(num_tokens - sequence.num_cached_tokens)


@contextmanager
def printing(daemon: Process, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [*PROGRAM, "events", "--target", daemon.addresses[0], *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_events_are_printed_as_they_happen(tmp_path: Path) -> None:
    with serving(tmp_path, *BUFFER) as daemon, Client(daemon.addresses[0]) as client:
        fill(client, 40)
        with printing(daemon) as program:
            assert program.stdout is not None
            snapshot = [program.stdout.readline().split() for _ in range(3)]
            assert snapshot[0] == ["snapshot", "started", "2", "blocks"]
            assert snapshot[1][:2] == ["blocks", "stored"]
            assert snapshot[2] == ["1", "snapshot", "ended"]
            fill(client, 48)
            stored = program.stdout.readline().split()
            assert (stored[0], stored[2:4], stored[-2]) == ("1", ["blocks", "stored"], "after")
            client.reset_cache()
            assert program.stdout.readline().split()[2:] == ["cache", "cleared"]
            program.send_signal(signal.SIGINT)
            assert program.wait(timeout=30) == 0


def test_with_json_an_event_is_an_object_a_line(tmp_path: Path) -> None:
    with serving(tmp_path, *BUFFER) as daemon, Client(daemon.addresses[0]) as client:
        fill(client, 16)
        fill(client, 32)
        with printing(daemon, "--json", "--from", "1") as program:
            assert program.stdout is not None
            stored = json.loads(program.stdout.readline())
        assert (stored["event"], stored["number"]) == ("blocks stored", 1)
        assert stored["token_ids"] == list(range(16, 32))
        looked = client.lookup(list(range(32)), want_hashes=True).block_hashes
        assert stored["parent_hash"] == looked[0].hex()
        assert stored["block_hashes"] == [looked[1].hex()]


def test_without_a_buffer_it_says_how_to_get_one(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as daemon, printing(daemon) as program:
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "--event-buffer" in errors
    assert "Traceback" not in errors


def test_the_end_of_the_daemon_is_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, *BUFFER) as daemon, printing(daemon) as program:
        assert program.stdout is not None
        assert "snapshot started" in program.stdout.readline()
        daemon.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "stopping" in errors


def test_events_are_published_over_zeromq(tmp_path: Path) -> None:
    options = ("--events-zmq", "tcp://127.0.0.1:0", "--events-zmq-replay", "tcp://127.0.0.1:0")
    with serving(tmp_path, *MANAGER, *options, "--events-topic", "kv") as daemon:
        line = logged_until(daemon, "publishing events")[-1]
        with Client(daemon.addresses[0]) as client, Subscriber(line["address"], "kv") as subscriber:
            fill(client, 40)
            replayed = []
            while not replayed:
                replayed = subscriber.replay(line["replay_address"], 0)
            assert [(topic, number) for topic, number, _ in replayed] == [(b"kv", 0)]
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0


def test_without_its_packages_zeromq_is_refused_as_usage(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(name='zmq')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from prefixcache.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "serve", *MANAGER, "--listen", "127.0.0.1:0"]
    command += ["--events-zmq", "tcp://127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "prefixcache[events]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", ["-1", "x"])
def test_a_number_that_is_none_is_refused_as_usage(number: str) -> None:
    command = [*PROGRAM, "events", "--from", number, "--target", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
