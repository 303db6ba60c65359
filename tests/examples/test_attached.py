"""`python -m examples.attached`, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_one_process_finds_and_reads_what_the_other_has_written() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.attached", "--storage", "cpu"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "finds 2047 of its 2048 tokens" in done.stdout
    assert done.stdout.count(": equal;") == 4
