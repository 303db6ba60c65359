"""A daemon's life as its operators see it: signals, sockets and exit codes of a real process."""

from __future__ import annotations

import signal
from pathlib import Path

from prefixcache.client import Client
from tests.support.program import MANAGER, logged_until, serving


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
