"""What systemd hears of the daemon, through real sockets, and when beats stay away."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions, LimitOptions
from prefixcache.server.service_manager import ServiceManager
from prefixcache.server.watchdog import Watchdog
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.gate import held
from tests.support.notify_socket import NotifySocket
from tests.support.stubs import connected
from tests.support.waiting import until

LOOKUP = cache_pb2.LookupRequest(token_ids=[1, 2])


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    name = f"{tmp_path}/notify" if request.param == "path" else f"@prefixcache-test-{os.getpid()}"
    with NotifySocket(name) as systemd:
        yield systemd


def manager_of(systemd: NotifySocket, **environ: str) -> ServiceManager:
    return ServiceManager.from_environment({"NOTIFY_SOCKET": systemd.name, **environ})


def test_systemd_hears_of_start_reload_beats_and_stop(systemd: NotifySocket) -> None:
    manager = manager_of(systemd)
    manager.ready("serving")
    assert systemd.receive() == {"READY": "1", "STATUS": "serving"}
    manager.reloading()
    message = systemd.receive()
    assert message.pop("MONOTONIC_USEC").isdigit()
    assert message == {"RELOADING": "1", "STATUS": "reloading"}
    manager.beat()
    assert systemd.receive() == {"WATCHDOG": "1"}
    manager.stopping(30.0)
    message = systemd.receive()
    assert message.pop("STATUS")
    assert message == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "40000000"}


def test_a_manager_that_is_slow_to_read_misses_beats_and_nothing_else(
    systemd: NotifySocket,
) -> None:
    manager = manager_of(systemd)
    room = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 1
    for _ in range(room + 5):
        manager.beat()
    with ThreadPoolExecutor(1) as thread:
        ready = thread.submit(manager.ready, "serving")
        with suppress(TimeoutError):  # Nothing is read before it has met the full queue.
            ready.result(timeout=0.5)
        num_beats, message = systemd.receive_until("READY")
        ready.result()
    assert (num_beats, message["STATUS"]) == (room, "serving")


def test_a_watchdog_is_told_to_wait_for_the_end_of_the_calls(systemd: NotifySocket) -> None:
    manager = manager_of(systemd, WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid()))
    assert manager.watchdog_s == 3.0
    manager.stopping(0.5)
    message = systemd.receive()
    assert message["WATCHDOG_USEC"] == message["EXTEND_TIMEOUT_USEC"] == "10500000"


def test_a_watchdog_of_another_process_is_not_ours(systemd: NotifySocket) -> None:
    assert manager_of(systemd, WATCHDOG_USEC="3000000", WATCHDOG_PID="1").watchdog_s is None
    assert manager_of(systemd, WATCHDOG_USEC="3000000").watchdog_s == 3.0
    assert manager_of(systemd).watchdog_s is None


def test_without_a_service_manager_or_once_it_is_gone_nothing_happens(tmp_path: Path) -> None:
    for name in ("", f"{tmp_path}/nobody", "@prefixcache-nobody"):
        manager = ServiceManager.from_environment({"NOTIFY_SOCKET": name})
        manager.ready("serving")
        manager.beat()
        manager.stopping(1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("NOTIFY_SOCKET", "relative"), ("WATCHDOG_USEC", "soon"), ("WATCHDOG_USEC", "0")],
)
def test_values_that_the_protocol_does_not_know_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        ServiceManager.from_environment({name: value})
    assert refused.value.field == name


# ---- the proof that goes ahead of a beat


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    limits = LimitOptions(max_queued_calls=1)
    with running_daemon(CacheOptions(16, 4), None, limits, max_workers=2) as running:
        yield running


def test_a_daemon_works_when_it_answers(running: RunningDaemon) -> None:
    assert running.server.works_within(20.0)


def test_a_daemon_whose_lock_is_never_given_back_does_not_work(running: RunningDaemon) -> None:
    with running.daemon.sequences.lock:
        assert not running.server.works_within(0.02)
    assert running.server.works_within(20.0)


def test_a_daemon_whose_threads_all_hang_does_not_work(running: RunningDaemon) -> None:
    with connected(running.target) as stubs:
        stubs.lookup([1])
        assert running.server.works_within(20.0)
        with held(running.daemon.sequences, "prepare") as gate:
            calls = [stubs.start("Lookup", LOOKUP) for _ in range(2)]
            for _ in calls:
                gate.wait()
            running.server.works_within(0.02)  # what has ended before may count once
            assert running.server._workers.num_waiting == 1  # its probe; the next finds no place
            assert not running.server.works_within(0.02)
            assert not running.server.works_within(0.02)
        for call in calls:
            stubs.finish(call)
        assert running.server.works_within(20.0)


def test_a_daemon_that_answers_some_of_too_many_calls_works(running: RunningDaemon) -> None:
    with connected(running.target) as stubs:
        assert running.server.works_within(20.0)
        stubs.lookup([1])
        with held(running.daemon.sequences, "prepare") as gate:
            calls = [stubs.start("Lookup", LOOKUP) for _ in range(2)]
            for _ in calls:
                gate.wait()
            calls.append(stubs.start("Lookup", LOOKUP))
            until(lambda: running.server._workers.num_waiting == 1)
            assert running.server.works_within(0.02)  # the Lookup of before
            until(lambda: not running.server.works_within(0.02))
        for call in calls:
            stubs.finish(call)


def test_beats_stay_away_while_the_daemon_does_not_work() -> None:
    proofs, beats = [True, True, False, False, True], []
    is_over = threading.Event()

    def works_within(seconds: float) -> bool:
        assert seconds == 0.005
        if not proofs:
            is_over.set()
            return False
        return proofs.pop(0)

    watchdog = Watchdog(0.01, works_within, lambda: beats.append(len(proofs)))
    watchdog.start()
    assert is_over.wait(20.0)
    watchdog.stop()
    assert beats == [4, 3, 0]


def test_without_a_watchdog_nothing_is_proved() -> None:
    def works_within(seconds: float) -> bool:
        raise AssertionError

    before = set(threading.enumerate())
    watchdog = Watchdog(None, works_within, lambda: None)
    watchdog.start()
    assert set(threading.enumerate()) <= before
    watchdog.stop()
