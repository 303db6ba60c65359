"""The examples in Node and shell do what they say, with a live daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache.client import Client
from tests.support.program import MANAGER, serving

pytestmark = pytest.mark.examples

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE = shutil.which("node")


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """That of a daemon with an empty cache, blocks of 16 tokens."""
    with serving(tmp_path, *MANAGER) as process:
        yield Path(process.addresses[0].removeprefix("unix:"))


def run(*command: str | Path) -> str:
    tools = str(Path(sys.executable).parent)
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": tools + os.pathsep + os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_left_behind(socket: Path, num_cached_blocks: int, num_requests: int) -> None:
    with Client(f"unix:{socket}") as client:
        stats = client.stats()
    assert (stats.cached, stats.referenced) == (num_cached_blocks, 0)
    assert stats.requests == num_requests


@pytest.mark.skipif(NODE is None, reason="no node on PATH")
@pytest.mark.skipif(
    not (EXAMPLES / "node" / "node_modules" / ".package-lock.json").is_file(),  # npm's last file
    reason="its packages are not installed: make examples does that where there is npm",
)
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "first", "then"),
    [(50, 4, "0 of 50", "48 of 50"), (32, 2, "0 of 32", "31 of 32"), (1, 1, "0 of 1", "0 of 1")],
)
def test_node_finds_again_what_it_has_committed(
    socket: Path, num_tokens: int, num_blocks: int, first: str, then: str
) -> None:
    assert NODE is not None
    script = EXAMPLES / "node" / "manage_blocks.js"
    lines = run(NODE, script, "--tokens", str(num_tokens), f"unix:{socket}").splitlines()
    assert lines[:4] == [
        "100 blocks of 16 tokens",
        f"lookup: {first} tokens are cached",
        f"allocate: {num_blocks} blocks, {' '.join(map(str, range(num_blocks)))}",
        f"commit: {then} tokens are cached",
    ]
    check_left_behind(socket, num_tokens // 16, 1)


def test_the_shell_finds_again_what_it_has_committed(socket: Path) -> None:
    first = run(EXAMPLES / "curl.sh", socket)
    assert first.count('"numCachedTokens": 32') == 1  # the Lookup after Commit
    again = run(EXAMPLES / "curl.sh", socket)
    assert again.count('"numCachedTokens": 32') == 3
    assert '"startPositions": [32], "numComputedTokens": [8]' in again
    check_left_behind(socket, 2, 2)
