"""`prefixcache serve --record`: from a daemon's calls to the size of its pool."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from prefixcache.client import Client
from tests.support.command_line import output_of
from tests.support.program import MANAGER, PROGRAM, logged_until, serving


def test_a_daemon_records_what_analyze_and_replay_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    with serving(tmp_path, *MANAGER, "--record", str(record)) as daemon:
        with Client(f"unix:{tmp_path}/prefixcache.sock") as client:
            for length in (40, 48, 40, 100):
                with client.sequence(range(length)) as sequence:
                    sequence.commit(length - sequence.num_cached_tokens)
            stats = client.stats()
        daemon.send_signal(signal.SIGTERM)
        logged_until(daemon, "stopped")
        assert daemon.wait(timeout=30) == 0
    analysed, replayed = (
        json.loads(output_of(capsys, command, str(record), "--blocks", "100", "--json"))
        for command in ("analyze", "replay")
    )
    assert stats.hit_tokens == 32 + 32 + 48
    assert analysed["pools"][0]["hit_blocks"] == replayed["hit_blocks"] == stats.hit_blocks
    assert replayed["num_cached_tokens"] == stats.hit_tokens
    assert analysed["time_unit"] == "s"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--record", "/no/such/folder/record"], "--record: cannot write /no/such/folder/record"),
        (["--record", "record", "--no-prefix-caching"], "cannot go with --no-prefix-caching"),
        (["--record", "record", "--record-limit", "1KiB"], "--record-limit"),
    ],
)
def test_a_record_that_cannot_be_is_a_usage_error(
    tmp_path: Path, options: list[str], problem: str
) -> None:
    done = subprocess.run(
        [*PROGRAM, "serve", *MANAGER, "--listen", f"unix:{tmp_path}/socket", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert problem in done.stderr
    assert not (tmp_path / "record").exists()
