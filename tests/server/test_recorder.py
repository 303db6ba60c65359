"""What a daemon records is a trace that gives its own counts again."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest

from prefixcache.client import Client
from prefixcache.core.hashing import HASH_ALGORITHMS, Hasher
from prefixcache.core.sequence import Prompt
from prefixcache.errors import NoRoomError
from prefixcache.replay import (
    DaemonTarget,
    InProcessTarget,
    analyze_trace,
    read_trace,
    replay_trace,
)
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.metrics import make_registry
from prefixcache.server.record_file import RecordFile
from prefixcache.server.recorder import Recorder
from prefixcache.types import NO_EXTRA_KEYS, CacheUse, ExtraKeys
from tests.replay.cuts import cut_trace
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.scrape import read_scrape, scrape
from tests.support.waiting import until


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Recording:
    running: RunningDaemon
    recorder: Recorder
    path: Path
    clock: Clock

    def lines(self) -> list[dict[str, object]]:
        self.recorder.write()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@contextmanager
def recording(folder: Path, cache: CacheOptions, max_queued_bytes: int = 2**26) -> Iterator:
    """A daemon whose recorder writes when it is told."""
    path, clock = folder / "record.jsonl", Clock()
    file = RecordFile(path, 2**24)
    recorder = Recorder(file, cache.block_size, max_queued_bytes=max_queued_bytes, clock=clock)
    with running_daemon(cache, on_allocated=recorder.add) as running:
        yield Recording(running, recorder, path, clock)
    recorder.close()


@pytest.mark.parametrize("hash_algorithm", ["sha256_cbor", "xxh3"])
@pytest.mark.parametrize(
    ("name", "trace_block", "block_size", "num_blocks"),
    [
        ("edge_4", 4, 4, 23),
        ("edge_4", 4, 2, 100),
        ("mooncake_conversation", 512, 512, 60),
        ("mooncake_synthetic", 512, 128, 900),
        ("agentic_64", 64, 64, 600),
    ],
)
def test_replaying_a_record_gives_what_the_daemon_counted(
    tmp_path: Path,
    hash_algorithm: str,
    name: str,
    trace_block: int,
    block_size: int,
    num_blocks: int,
) -> None:
    cache = CacheOptions(num_blocks, block_size, hash_algorithm)
    with recording(tmp_path, cache) as recorded:
        with Client(recorded.running.target) as client:
            served = replay_trace(cut_trace(name, trace_block), DaemonTarget(client))
            stats = client.stats()
        recorded.recorder.write()
    trace = read_trace(tmp_path / "record.jsonl")
    assert trace.trace_block == block_size
    again = replay_trace(trace, InProcessTarget(num_blocks, block_size))
    assert {**asdict(again), "seconds": 0} == {**asdict(served), "seconds": 0}
    assert (again.query_tokens, again.num_cached_tokens) == (stats.queries_tokens, stats.hit_tokens)
    assert (again.query_blocks, again.hit_blocks) == (stats.queries_blocks, stats.hit_blocks)
    assert again.evictions == stats.evictions
    (counts,) = analyze_trace(trace, block_size, [num_blocks]).pools
    assert (counts.hit_blocks, counts.evictions) == (stats.hit_blocks, stats.evictions)
    assert 0 < stats.hit_blocks < stats.queries_blocks


def test_a_line_has_hashes_times_and_lengths_and_no_tokens(tmp_path: Path) -> None:
    with (
        recording(tmp_path, CacheOptions(100, 4, hash_seed="a seed of some length")) as recorded,
        Client(recorded.running.target) as client,
    ):
        client.sequence([5, 6, 7, 8, 9, 10, 11, 12, 13])
        recorded.clock.now_s += 1.2345
        client.sequence([5, 6, 7], extra_keys=ExtraKeys(cache_salt="salt"))
        first, second = recorded.lines()
    hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], "a seed of some length", 4)
    hashes = hasher.chain(None, np.arange(5, 13, dtype=np.uint32), NO_EXTRA_KEYS).hashes
    ids = [int.from_bytes(digest[:6], "little") for digest in hashes]
    assert first == {"timestamp": 0, "input_length": 9, "trace_block": 4, "hash_ids": ids}
    assert second == {"timestamp": 1234, "input_length": 3, "trace_block": 4, "hash_ids": []}
    assert read_trace(tmp_path / "record.jsonl").num_tokens == 12


@pytest.mark.parametrize("session_ttl_s", [30.0, None])
def test_each_started_sequence_is_one_line_whatever_its_owner(
    tmp_path: Path, session_ttl_s: float | None
) -> None:
    with recording(tmp_path, CacheOptions(10, 4)) as recorded:
        with Client(recorded.running.target, session_ttl_s=session_ttl_s) as client:
            first = client.sequence(range(4), request_id="a request")
            client.sequence(range(4), request_id="a request")
            first.commit(4)
            first.fork(1)
            client.lookup(range(4))
            with pytest.raises(NoRoomError):
                client.sequence(range(100, 140))
            with client.steps() as steps:
                step = steps.new_step()
                step.sequence(range(8))
                steps.run(step)
        lengths = [line["input_length"] for line in recorded.lines()]
    assert lengths == [4, 8]


def test_how_a_sequence_uses_the_cache_is_said(tmp_path: Path) -> None:
    with (
        recording(tmp_path, CacheOptions(100, 4)) as recorded,
        Client(recorded.running.target) as client,
    ):
        for use in CacheUse:
            client.sequence(range(8), cache_use=use)
        client.sequence(range(8), resumed=True)
        lines = recorded.lines()
    assert [line.get("cache_use") for line in lines] == [None, "no_read", "no_write", None]
    assert [line.get("resumed") for line in lines] == [None, None, None, True]
    assert read_trace(tmp_path / "record.jsonl").num_keys == 2


def add_prompts(recorder: Recorder, count: int) -> None:
    hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], None, 4)
    for index in range(count):
        tokens = np.arange(index, index + 40, dtype=np.uint32)
        chain = hasher.chain(None, tokens, NO_EXTRA_KEYS)
        recorder.add(Prompt(tokens, NO_EXTRA_KEYS, chain), CacheUse.READ_WRITE, False)


Warnings = Callable[[], list[int]]


@pytest.fixture
def missing_said(monkeypatch: pytest.MonkeyPatch) -> Warnings:
    """Numbers of missing requests that the log was told."""
    said: list[int] = []

    class Log:
        def warning(self, event: str, *, missing: int) -> None:
            said.append(missing)

        def error(self, event: str, *, problem: str = "") -> None:
            assert "cannot be written" in event or "does not answer" in event

    monkeypatch.setattr("prefixcache.server.recorder._log", Log())
    return lambda: said


def test_what_does_not_fit_into_the_queue_is_dropped_counted_and_said(
    tmp_path: Path, missing_said: Warnings
) -> None:
    path = tmp_path / "record.jsonl"
    one = 10 * 32 + 256
    recorder = Recorder(RecordFile(path, 2**20), 4, max_queued_bytes=3 * one)
    add_prompts(recorder, 10)
    assert recorder.num_dropped == 7
    with running_daemon(CacheOptions(8, 4)) as running:
        registry = make_registry(running.daemon, running.server.call_counts, recorder)
        found = read_scrape(generate_latest(registry).decode())
        assert found["prefixcache_record_missing_requests_total"] == 7
        assert scrape(running)["prefixcache_record_missing_requests_total"] == 0
    recorder.write()
    assert missing_said() == [7]
    add_prompts(recorder, 4)
    recorder.write()
    assert missing_said() == [7]  # not twice as many yet
    add_prompts(recorder, 20)
    recorder.close()
    assert missing_said() == [7, 25, 25]
    assert len(path.read_text().splitlines()) == 9
    assert read_trace(path).num_tokens == 9 * 40


def test_a_request_larger_than_a_file_may_be_is_missing(
    tmp_path: Path, missing_said: Warnings
) -> None:
    recorder = Recorder(RecordFile(tmp_path / "record.jsonl", 64), 4)
    add_prompts(recorder, 2)
    recorder.write()
    assert recorder.num_dropped == 2
    recorder.close()


def test_when_the_disk_fails_the_record_ends_with_a_whole_line(
    tmp_path: Path, missing_said: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    recorder = Recorder(RecordFile(path, 2**20), 4)
    add_prompts(recorder, 2)
    recorder.write()
    real_write = os.write

    def write_a_part(fd: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return real_write(fd, data[:30])

    monkeypatch.setattr("os.write", write_a_part)
    add_prompts(recorder, 3)
    recorder.write()
    monkeypatch.undo()
    add_prompts(recorder, 1)
    recorder.close()
    assert recorder.num_dropped == 4
    assert len(read_trace(path).requests) == 2


def test_a_disk_that_does_not_answer_keeps_nobody_from_stopping(
    tmp_path: Path, missing_said: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    recorder = Recorder(RecordFile(path, 2**20), 4, close_timeout_s=0.01)
    real_write, has_begun, answers = os.write, threading.Event(), threading.Event()

    def write_late(fd: int, data: bytes) -> int:
        has_begun.set()
        answers.wait()
        return real_write(fd, data)

    monkeypatch.setattr("os.write", write_late)
    add_prompts(recorder, 1)
    recorder.start()
    assert has_begun.wait(timeout=60)
    add_prompts(recorder, 1)  # is not kept waiting either
    recorder.close()
    assert path.read_text() == ""
    answers.set()
    until(lambda: not any(one.name == "recorder" for one in threading.enumerate()))
    recorder.close()
    assert len(read_trace(path).requests) == 2


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    recorder = Recorder(RecordFile(path, 2**20), 4)
    recorder.start()
    add_prompts(recorder, 5)
    recorder.close()
    assert len(read_trace(path).requests) == 5
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
