"""A daemon's life as its operators see it: signals, sockets and exit codes of a real process."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefixcache.address import UnixAddress
from prefixcache.client import Client
from prefixcache.errors import UnavailableError
from prefixcache.server.open_files import OWN_FILES
from tests.server.test_crowded_addresses import to_socket
from tests.support.notify_socket import NotifySocket
from tests.support.program import MANAGER, PROGRAM, logged_until, serving
from tests.support.waiting import WAIT_S, until


def write_config(path: Path, *lines: str) -> None:
    path.write_text("\n".join(('storage = "none"', "num_blocks = 100", *lines)))


def test_sighup_reads_the_file_again_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "daemon.toml"
    write_config(path, 'log_level = "info"')
    with serving(tmp_path, "--config", str(path)) as daemon:
        write_config(path, 'log_level = "loud"')
        daemon.send_signal(signal.SIGHUP)
        refused = logged_until(daemon, "reload refused, nothing is changed")[-1]
        assert "--log-level" in refused["problem"]
        assert str(path) in refused["problem"]

        write_config(path, 'log_level = "warning"', "num_blocks = 7")
        path.write_text(path.read_text().replace("num_blocks = 100\n", ""))
        daemon.send_signal(signal.SIGHUP)
        late = logged_until(daemon, "changed settings that need a restart")[-1]
        assert (late["level"], late["settings"]) == ("warning", ["--num-blocks"])
        with Client(f"unix:{tmp_path}/prefixcache.sock") as client:
            assert client.server_info().num_blocks == 100

        daemon.send_signal(signal.SIGTERM)
        assert daemon.stderr is not None
        assert daemon.stderr.read() == ""  # "stopping" and "stopped" are below the new level
        assert daemon.wait(timeout=30) == 0


def test_sighup_without_a_file_leaves_the_daemon_serving(tmp_path: Path) -> None:
    with (
        serving(tmp_path, *MANAGER) as daemon,
        Client(f"unix:{tmp_path}/prefixcache.sock") as client,
    ):
        with client.sequence(range(20)) as sequence:
            for _ in range(3):
                daemon.send_signal(signal.SIGHUP)
                logged_until(daemon, "reloaded")
            sequence.commit(20)
        daemon.send_signal(signal.SIGTERM)
        daemon.send_signal(signal.SIGHUP)
        assert daemon.wait(timeout=30) == 0


@pytest.mark.parametrize("late", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_when_all_is_done_changes_no_exit_code(
    tmp_path: Path, late: signal.Signals
) -> None:
    with serving(tmp_path, *MANAGER) as daemon:
        daemon.send_signal(signal.SIGTERM)
        logged_until(daemon, "stopped")
        while daemon.poll() is None:
            daemon.send_signal(late)
        assert daemon.returncode == 0


def test_systemd_is_told_of_start_reload_and_stop_and_hears_beats(tmp_path: Path) -> None:
    with NotifySocket(f"{tmp_path}/notify") as systemd:
        environ = {"NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": "100000"}
        with serving(tmp_path, *MANAGER, environ=environ) as daemon:
            ready = systemd.receive_until("READY")[1]
            assert daemon.addresses[0] in ready["STATUS"]
            systemd.receive_until("WATCHDOG")
            daemon.send_signal(signal.SIGHUP)
            systemd.receive_until("RELOADING")
            systemd.receive_until("READY")
            daemon.send_signal(signal.SIGTERM)
            systemd.receive_until("STOPPING")
            assert daemon.wait(timeout=30) == 0


def test_the_log_of_the_start_has_pid_and_boot_id(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as daemon, Client(daemon.addresses[0]) as client:
        assert daemon.start["pid"] == daemon.pid
        assert daemon.start["boot_id"] == client.server_info().boot_id.hex()


def test_port_0_is_logged_as_the_port_that_was_bound(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, "--listen", "127.0.0.1:0") as daemon:
        (address,) = daemon.addresses
        assert not address.endswith(":0")
        with Client(address) as client:
            assert client.server_info().num_blocks == 100


def test_a_second_daemon_names_the_first_which_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as first, Client(first.addresses[0]) as client:
        command = [*PROGRAM, "serve", *MANAGER, "--listen", first.addresses[0]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, f"pid {first.pid}" in done.stderr) == (2, True)
        assert client.server_info().num_blocks == 100


def test_a_socket_that_a_killed_daemon_has_left_is_taken_over(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as first:
        path = Path(first.addresses[0].removeprefix("unix:"))
        first.kill()
        first.wait(timeout=30)
        assert path.is_socket()
        with serving(tmp_path, *MANAGER) as second, Client(second.addresses[0]) as client:
            assert client.server_info().num_blocks == 100


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "prefixcache.sock"
    path.write_text("precious")
    command = [*PROGRAM, "serve", *MANAGER, "--listen", str(UnixAddress(str(path)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "is no socket" in done.stderr
    assert path.read_text() == "precious"


def test_the_daemon_starts_no_process(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as daemon, Client(daemon.addresses[0]) as client:
        with client.sequence(range(20)) as sequence:
            sequence.commit(20)
        children = Path(f"/proc/{daemon.pid}/task").glob("*/children")
        assert [path.read_text() for path in children if path.read_text()] == []


def test_a_daemon_whose_log_nobody_reads_any_more_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as daemon, Client(daemon.addresses[0]) as client:
        assert daemon.stderr is not None
        daemon.stderr.close()
        for _ in range(3):
            daemon.send_signal(signal.SIGHUP)
            with client.sequence([1]) as sequence:
                sequence.commit(1)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0


STOPPED = """
import sys, threading
from prefixcache import Client

client = Client(sys.argv[1], timeout_s=120)

def run():
    while True:
        assert len(client.lookup(range(5000), want_hashes=True).block_hashes) == 5000
        answered.release()

answered = threading.Semaphore(0)
for _ in range(48):
    threading.Thread(target=run, daemon=True).start()
for line in sys.stdin:
    for _ in range(96):
        answered.acquire()
    print("goes on", flush=True)
"""


def test_a_stopped_client_with_many_calls_open_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Its calls and the replies that it does not read, 160 kB each, hold no thread."""
    with (
        serving(tmp_path, *MANAGER, "--block-size", "1", "--max-workers", "2") as daemon,
        subprocess.Popen(
            [sys.executable, "-c", STOPPED, daemon.addresses[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as stopped,
        ExitStack() as ending,
        Client(daemon.addresses[0], timeout_s=WAIT_S) as client,
    ):
        ending.callback(stopped.kill)
        assert stopped.stdin is not None
        assert stopped.stdout is not None
        stopped.stdin.write("\n")
        assert stopped.stdout.readline() == "goes on\n"
        stopped.send_signal(signal.SIGSTOP)
        for number in range(50):
            with client.sequence([number]) as sequence:
                sequence.append([1])
        stopped.send_signal(signal.SIGCONT)
        stopped.stdin.write("\n")
        assert stopped.stdout.readline() == "goes on\n"


# ---- open files


@pytest.fixture
def hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_the_limit_of_open_files_is_raised(tmp_path: Path, hard_limit: int) -> None:
    assert hard_limit > 300
    with serving(tmp_path, *MANAGER, file_limit=300) as daemon:
        assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)
        (line,) = (line for line in daemon.log if "raised the limit" in line["event"])
        assert (line["before"], line["now"]) == (300, hard_limit)


def test_a_hard_limit_too_low_for_the_connections_is_a_warning(
    tmp_path: Path, hard_limit: int
) -> None:
    fits = str(hard_limit - OWN_FILES)
    too_many = str(hard_limit - OWN_FILES + 1)
    for connections, num_warnings in ((fits, 0), (too_many, 1)):
        with serving(tmp_path, *MANAGER, "--max-connections", connections) as daemon:
            found = [line for line in daemon.log if "--max-connections" in line["event"]]
            assert len(found) == num_warnings


def test_a_user_has_the_connections_that_the_flag_says(tmp_path: Path) -> None:
    flags = ("--max-connections", "8", "--max-per-peer", "2")
    with serving(tmp_path, *MANAGER, *flags) as daemon, ExitStack() as opened:
        path = daemon.addresses[0].removeprefix("unix:")
        connections = [opened.enter_context(to_socket(path)) for _ in range(5)]
        until(lambda: sum(not connection.is_cut() for connection in connections) == 2)
        assert not any(connection.is_cut() for connection in connections[:2])


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_without_free_descriptors_the_daemon_serves_who_is_there_and_later_all(
    kind: str, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/own.sock" if kind == "unix" else "127.0.0.1:0"
    with (
        serving(tmp_path, *MANAGER, "--listen", address) as daemon,
        Client(daemon.addresses[0]) as client,
        ExitStack() as others,
    ):
        sequence = client.sequence(range(20))
        limit = max(map(int, os.listdir(f"/proc/{daemon.pid}/fd"))) + 5
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(20 + limit):
            others.enter_context(connected_socket(daemon.addresses[0]))
        until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) == limit)
        before_s, start_s = cpu_seconds(daemon), time.monotonic()
        while time.monotonic() < start_s + 1.0:
            sequence.append([1])
            time.sleep(0.05)
        assert cpu_seconds(daemon) - before_s < 0.5, "it spins"
        others.close()
        with Client(daemon.addresses[0], timeout_s=WAIT_S) as late:
            until(lambda: is_served(late))
        sequence.append([1])
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0


def connected_socket(address: str) -> socket.socket:
    if address.startswith("unix:"):
        made = socket.socket(socket.AF_UNIX)
        made.connect(address.removeprefix("unix:"))
        return made
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def is_served(client: Client) -> bool:
    try:
        return client.stats().num_blocks == 100
    except UnavailableError:
        return False
