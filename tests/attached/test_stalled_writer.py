"""What a writer has not committed when its session is lost is nobody's as long as it lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from prefixcache import Client, PoolStats, errors
from prefixcache.types import PoolAccess
from tests.attached.served import BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, Served, compute
from tests.support.program import logged_until, serving
from tests.support.waiting import until

PROMPT = range(100, 110)


@dataclass
class Writer:
    """block_ids: the first is committed."""

    process: subprocess.Popen[str]
    block_ids: list[int]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def writing(target: str, session_ttl_s: float = 60.0) -> Iterator[Writer]:
    program = ("-m", "tests.attached.stalled_writer", target, str(session_ttl_s))
    command = [sys.executable, *program]
    folder = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Writer(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture
def writer(served: Served) -> Iterator[Writer]:
    with writing(served.running.target) as writer:
        yield writer


def stats_of(served: Served) -> PoolStats:
    sequences = served.running.daemon.sequences
    with sequences.lock:
        return sequences.stats()


def test_a_stopped_writer_that_goes_on_alters_nobodys_blocks(
    served: Served, writer: Writer
) -> None:
    writer.stop()
    served.end_session()
    stats = stats_of(served)
    assert (stats.sessions, stats.referenced, stats.quarantined, stats.evictable) == (0, 0, 2, 1)

    client = served.client()
    assert client.lookup(PROMPT).num_cached_tokens == BLOCK_SIZE, "what was committed is a hit"
    num_tokens = (NUM_BLOCKS - 2) * BLOCK_SIZE
    sequence = client.sequence(range(num_tokens))
    assert not set(sequence.block_ids.tolist()) & set(writer.block_ids[1:])
    compute(client, sequence, served.steps(num_tokens))
    with pytest.raises(errors.NoRoomError) as refused:
        client.sequence([1])
    assert refused.value.fields["quarantined"] == "2"

    before = served.spans.clone()
    writer.go_on()
    until(lambda: not torch.equal(served.spans[writer.block_ids[1:]], before[writer.block_ids[1:]]))
    others = sequence.block_ids.tolist()
    assert torch.equal(served.spans[others], before[others])

    with capture_logs() as logs:
        writer.kill()
        until(lambda: logs)
    (log,) = logs
    assert (log["client"], log["pid"], log["blocks"]) == ("a stalled one", writer.process.pid, 2)
    assert stats_of(served).quarantined == 0
    assert torch.equal(served.spans[others], before[others])
    assert stats_of(served).blank == 2
    with client.sequence([1]) as another:
        assert another.block_ids.tolist()[0] in writer.block_ids[1:]


def test_a_writer_that_is_killed_leaves_what_it_committed_and_nothing_else(
    served: Served, writer: Writer
) -> None:
    writer.kill()
    attachments = served.running.daemon.attachments
    assert attachments is not None
    until(lambda: attachments.count(PoolAccess.WRITE) == 0)
    served.end_session()
    stats = stats_of(served)
    assert (stats.referenced, stats.quarantined, stats.evictable) == (0, 0, 1)
    block = served.spans[writer.block_ids[0]].view(torch.float32)
    assert torch.equal(block, torch.full_like(block, 0.5))
    assert served.client().lookup(PROMPT).num_cached_tokens == BLOCK_SIZE


def test_a_writer_that_closes_its_view_gives_back_what_was_kept(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(10))
    compute(view, sequence, served.steps(10))
    sequence.commit(5)
    served.end_session()
    assert stats_of(served).quarantined == 2
    view.close()
    stats = stats_of(served)
    assert (stats.quarantined, stats.evictable, stats.blank) == (0, 1, NUM_BLOCKS - 1)


def test_a_daemon_ends_although_blocks_are_kept_for_a_writer(tmp_path: Path) -> None:
    kv = ("--num-layers", str(NUM_LAYERS), "--num-kv-heads", "2", "--head-dim", "16")
    pool = ("--num-blocks", "8", "--block-size", str(BLOCK_SIZE), "--dtype", "float32")
    with (
        serving(tmp_path, *kv, *pool) as daemon,
        writing(daemon.addresses[0], session_ttl_s=6.0) as writer,
        Client(daemon.addresses[0]) as client,
    ):
        writer.stop()
        (*_, last) = logged_until(
            daemon, "blocks are kept until writers without a session have ended"
        )
        assert last["blocks"] == client.stats().quarantined == 2
        assert last["writers"] == [f"a stalled one (pid {writer.process.pid})"]
        assert client.reset_cache() == 1, "nothing is referenced"
        daemon.terminate()
        assert daemon.wait(60) == 0


def test_nothing_is_kept_for_a_reader(served: Served) -> None:
    client, _ = served.attached(writable=False)
    client.sequence(range(10))
    served.end_session()
    assert stats_of(served).quarantined == 0
