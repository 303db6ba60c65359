"""`serve --metrics-listen`: where the metrics are, who may have the address, when it is gone."""

from __future__ import annotations

import signal
import stat
import subprocess
from pathlib import Path

from tests.support.program import MANAGER, PROGRAM, http_status, logged_until, serving

ANY_PORT = ("--metrics-listen", "127.0.0.1:0")


def test_metrics_are_served_where_the_log_says(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *ANY_PORT) as daemon:
        address = logged_until(daemon, "serving metrics")[-1]["address"]
        assert address.startswith("127.0.0.1:") and not address.endswith(":0")
        for path in ("/metrics", "/healthz", "/readyz", "/", "/status.json"):
            assert http_status(address, path) == 200
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0


def test_without_the_flag_there_are_no_metrics(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER) as daemon:
        daemon.send_signal(signal.SIGTERM)
        assert "metrics" not in str(logged_until(daemon, "stopped"))


def test_a_unix_socket_of_metrics_is_the_groups_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with serving(tmp_path, *MANAGER, "--metrics-listen", f"unix:{path}") as daemon:
        assert logged_until(daemon, "serving metrics")[-1]["address"] == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0
    assert not path.exists()


def test_an_address_for_metrics_that_is_taken_is_refused_as_usage(tmp_path: Path) -> None:
    with serving(tmp_path, *MANAGER, *ANY_PORT) as daemon:
        taken = logged_until(daemon, "serving metrics")[-1]["address"]
        listen = ("--listen", f"unix:{tmp_path}/other.sock", "--metrics-listen", taken)
        command = [*PROGRAM, "serve", *MANAGER, *listen]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--metrics-listen" in done.stderr and taken in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_everyone_can_write_to_holds_no_socket_of_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    command = [*PROGRAM, "serve", *MANAGER, "--listen", "127.0.0.1:0"]
    command += ["--metrics-listen", f"unix:{folder}/metrics.sock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--metrics-listen" in done.stderr and "every user can write" in done.stderr
