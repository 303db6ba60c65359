"""`prefixcache bench rpc`, with tiny sizes, a real daemon and a real echo."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.bench.calls import BATCH, Connection, make_kinds, message_sizes
from prefixcache.bench.children import daemon_process, echo_process, load_process
from prefixcache.bench.echo import echo_stub
from prefixcache.bench.split import PARTS, SUM
from prefixcache.client.channel import resolve_address
from prefixcache.errors import UnavailableError
from prefixcache.server.daemon import CacheOptions
from tests.bench.run_bench import rows_named
from tests.support.command_line import output_of
from tests.support.daemon import RunningDaemon, running_daemon

CALLS = ("Lookup", "Allocate", "Append, 1 row", f"Append, {BATCH} rows", "Free")
ARGUMENTS = ("bench", "rpc", "--quick", "--tokens", "100", "--json")
POOL = CacheOptions(num_blocks=2000)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of one run of the command, as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "prefixcache.cli", *ARGUMENTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_call_stands_beside_an_echo_of_its_sizes(report: dict[str, Any]) -> None:
    for call in CALLS:
        for in_flight in (1, 4):
            latency, rate = rows_named(report, call, in_flight=in_flight)
            echo, echo_rate = rows_named(report, f"{call}: echo", in_flight=in_flight)
            assert latency["request_bytes"] == echo["request_bytes"] > 0
            assert latency["reply_bytes"] == echo["reply_bytes"] > 0
            assert latency["count"] == echo["count"] >= 20
            ratio = latency["median_s"] / echo["median_s"]
            assert latency["ratios"]["echo"] == pytest.approx(ratio, rel=1e-4)
            assert rate["median_per_s"] > 0
            assert echo_rate["median_per_s"] > 0
        client, _ = rows_named(report, f"{call}: Python client")
        assert client["in_flight"] == 1


@pytest.mark.parametrize("rows", ["1 row", "64 rows"])
def test_an_append_is_measured_as_a_call_and_as_steps_on_the_way(
    report: dict[str, Any], rows: str
) -> None:
    (call,) = rows_named(report, f"Append, {rows}: call")
    for depth in (1, 2, 4):
        (step,) = rows_named(report, f"Append, {rows}: Step, {depth} on the way")
        assert step["count"] == call["count"]
        ratio = step["median_s"] / call["median_s"]
        assert step["ratios"]["the call"] == pytest.approx(ratio, rel=1e-4)


def test_an_engines_step_is_measured_as_its_calls_and_as_one_step(report: dict[str, Any]) -> None:
    (calls,), (step,) = rows_named(report, "its four calls"), rows_named(report, "one Step")
    assert calls["count"] == step["count"]
    ratio = step["median_s"] / calls["median_s"]
    assert step["ratios"]["its four calls"] == pytest.approx(ratio, rel=1e-4)


def test_the_parts_of_a_call_make_its_sum(report: dict[str, Any]) -> None:
    for call in ("Lookup", "Allocate", f"Append, {BATCH} rows"):
        parts = {
            row["name"]: row["median_s"]
            for row in report["results"]
            if row["section"] == f"Parts of a call: {call}"
        }
        assert parts.keys() == {*PARTS, SUM}
        assert parts[SUM] > max(parts[part] for part in PARTS)


def test_a_short_lookup_is_measured_alone_and_beside_long_calls_that_ran(
    report: dict[str, Any],
) -> None:
    rows = rows_named(report, "Lookup of 100 tokens")
    assert [row["beside"].startswith("alone") for row in rows] == [True, False, True, False]
    for alone, beside in (rows[:2], rows[2:]):
        assert alone["count"] == beside["count"] == 20
        ratio = beside["p99_s"] / alone["p99_s"]
        assert beside["ratios"]["p99 alone"] == pytest.approx(ratio, rel=1e-4)
        assert beside["target"]["at_most"] == 3
        assert beside["ratios"]["the echo's p99"] > 0
    for long in ("Lookup of 16,384 tokens", "Prefill of 512 tokens"):
        (row,) = rows_named(report, long)
        assert row["max_per_s"] > 0


def test_a_target_that_cannot_be_reached_exits_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = f"unix:{tmp_path}/no.sock"
    message = output_of(capsys, "bench", "rpc", "--quick", "--target", target, code=1)
    assert message.count("\n") == 1


def test_the_echo_returns_as_many_bytes_as_its_method_says() -> None:
    with (
        echo_process([0, 7, 70_000], num_workers=2) as target,
        grpc.insecure_channel(resolve_address(target).target) as channel,
    ):
        for size in (0, 7, 70_000):
            assert echo_stub(channel, size)(b"request") == bytes(size)


def test_sizes_are_those_of_the_messages_on_the_wire() -> None:
    with (
        running_daemon(POOL) as running,
        grpc.insecure_channel(resolve_address(running.target).target) as channel,
    ):
        with ExitStack() as ended:
            sizes = message_sizes(make_kinds(Connection(channel), 100, ended))
            assert num_sequences(running) == 1 + BATCH  # those that go on appending
        assert num_sequences(running) == 0
    assert tuple(sizes) == CALLS
    assert sizes["Lookup"].request > 400  # 4 bytes a token
    assert sizes["Allocate"].reply > 4 * 7  # 4 bytes a block id
    one, many = sizes["Append, 1 row"], sizes[f"Append, {BATCH} rows"]
    assert many.request > one.request + (BATCH - 1) * 20


def num_sequences(running: RunningDaemon) -> int:
    with running.daemon.sequences.lock:
        return running.daemon.sequences.stats().sequences


def test_a_daemon_that_cannot_start_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(UnavailableError, match="did not start"), daemon_process("--no-such-flag"):
        pass


def test_load_rests_until_told_and_counts_its_calls() -> None:
    with running_daemon(POOL) as running, load_process(running.target, "lookup", 50) as load:
        for _ in range(2):
            with load.running() as done:
                pass
            (count,) = done
            assert count >= 1
