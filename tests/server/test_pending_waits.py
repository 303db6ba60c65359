"""Allocates that wait for what another sequence computes, through a real daemon.

Nothing depends on how fast anything is: a test goes on when so many calls wait.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from prefixcache import Client
from prefixcache.core.sessions import SessionLimits
from prefixcache.rpc._pb import cache_pb2, session_pb2
from prefixcache.server.daemon import CacheOptions, LimitOptions, ModelOptions
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants
from tests.support.stubs import Peer, Refused, Stubs, connected, refusals
from tests.support.waiting import WAIT_S, until

B = 16
PROMPT = list(range(1, 2001))
OTHER = list(range(5001, 5101))
LONG_MS = 60_000
"""Only a test that fails waits this long."""
OWNER_TTL_S = 10.0


@dataclass
class Scene:
    running: RunningDaemon
    stubs: Stubs
    now_s: list[float]
    futures: list[Any] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return self.running.daemon.sequences.pending.num_waiters

    def start(
        self,
        tokens: list[int],
        peer: Peer | None = None,
        timeout_s: float = 2 * WAIT_S,
        **fields: Any,
    ) -> Any:
        owner = (peer or Peer(self.stubs)).owner
        fields = {"wait_pending_ms": LONG_MS} | fields
        request = cache_pb2.AllocateRequest(owner=owner, token_ids=tokens, **fields)
        return self.stubs.start("Allocate", request, timeout_s)

    def waiting(self, count: int, tokens: list[int], **fields: Any) -> list[tuple[Peer, Any]]:
        """So many more calls that wait."""
        before = self.num_waiting
        calls = []
        for _ in range(count):
            peer = Peer(self.stubs)
            calls.append((peer, self.start(tokens, peer, **fields)))
        self.until_waiting(before + count)
        return calls

    def until_waiting(self, count: int) -> None:
        until(lambda: self.num_waiting == count)

    def session(self, ttl_s: float = 5.0) -> Peer:
        request = session_pb2.OpenSessionRequest(ttl_s=ttl_s)
        return Peer(self.stubs, self.stubs.call("OpenSession", request).session_id)

    def check_nothing_waits(self, num_sequences: int) -> None:
        sequences = self.running.daemon.sequences
        self.until_waiting(0)
        with sequences.lock:
            check_invariants(sequences)
            assert len(sequences.live) == num_sequences


@contextmanager
def served(max_workers: int = 2, **limits: Any) -> Iterator[Scene]:
    now_s = [0.0]
    cache = CacheOptions(2048, B, owner_ttl_s=OWNER_TTL_S)
    limits = LimitOptions(**limits)
    with (
        running_daemon(
            cache, None, limits, max_workers=max_workers, clock=lambda: now_s[0]
        ) as running,
        connected(running.target) as stubs,
    ):
        yield Scene(running, stubs, now_s)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with served() as made:
        yield made


# ---- one computation


def test_ten_threads_compute_one_prompt_once(scene: Scene) -> None:
    allocated = threading.Barrier(2)

    def work(client: Client) -> int:
        with client.sequence(PROMPT, wait_pending_s=50.0) as sequence:
            num_cached = sequence.num_cached_tokens
            if num_cached == 0:
                allocated.wait(WAIT_S)
                sequence.commit(len(PROMPT))
            return num_cached

    with (
        Client(scene.running.target, timeout_s=60.0, session_ttl_s=None) as client,
        ThreadPoolExecutor(10) as threads,
    ):
        counts = [threads.submit(work, client) for _ in range(10)]
        scene.until_waiting(9)
        allocated.wait(WAIT_S)
        found = sorted(count.result(WAIT_S) for count in counts)
        stats = client.stats()
    assert found == [0] + [len(PROMPT) - 1] * (9)
    assert stats.prefill_tokens_computed == len(PROMPT)
    scene.check_nothing_waits(0)


CLIENT_PROCESS = """
import sys
from prefixcache import Client

tokens = range(1, 2001)
with Client(sys.argv[1], timeout_s=60.0, client_name=sys.argv[2]) as client:
    client.server_info()
    print("ready", flush=True)
    sys.stdin.readline()
    with client.sequence(tokens, wait_pending_s=50.0) as sequence:
        cached = sequence.num_cached_tokens
        print(cached, flush=True)
        sys.stdin.readline()
        if cached == 0:
            sequence.commit(len(tokens))
            print("computed", flush=True)
            sys.stdin.readline()
"""


@contextmanager
def client_process(target: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """It is ready, allocates at the first line, computes what is missing at the second."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT_PROCESS, target, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert read(process) == "ready"
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_ten_processes_compute_one_prompt_once_also_if_the_first_is_killed(scene: Scene) -> None:
    sequences, target = scene.running.daemon.sequences, scene.running.target
    with ExitStack() as stack, ThreadPoolExecutor(10) as threads:
        contexts = [client_process(target, str(number)) for number in range(10)]
        processes = list(threads.map(stack.enter_context, contexts))
        for process in processes:
            tell(process)
        scene.until_waiting(9)
        (first,) = sequences.listings.sequences_after(0, 2)
        session = sequences.live.sessions.find(first.owner)
        until(lambda: session.stream is not None)
        killed = processes.pop(int(session.client_name))
        killed.kill()
        until(lambda: session.stream is None)
        scene.now_s[0] += SessionLimits().reconnect_grace_s
        scene.running.sweep()
        scene.until_waiting(8)
        for process in processes:
            tell(process)
        assert sorted(map(read, processes)) == ["0"] + ["1999"] * 8
        assert scene.stubs.stats().prefill_tokens_computed == len(PROMPT)


def test_ten_threads_prefill_one_prompt_once() -> None:
    """The prompt's last token is computed by each: somebody must have its output."""
    layout, gate = KVLayout(2, 1, 8, B, "float32"), threading.Barrier(2)

    def work(client: Client) -> int:
        with client.sequence(PROMPT, wait_pending_s=50.0) as sequence:
            num_cached = sequence.num_cached_tokens
            if num_cached == 0:
                gate.wait(WAIT_S)
            k = np.ones((len(PROMPT) - num_cached, 1, 8), dtype=np.float32)
            for start in range(0, len(k), 500):
                for layer in range(layout.num_layers):
                    chunk = k[start : start + 500]
                    sequence.prefill(layer, chunk, chunk, chunk)
            return num_cached

    with (
        running_daemon(CacheOptions(256, B), ModelOptions(layout), max_workers=2) as running,
        Client(running.target, timeout_s=60.0) as client,
        ThreadPoolExecutor(10) as threads,
    ):
        counts = [threads.submit(work, client) for _ in range(10)]
        until(lambda: running.daemon.sequences.pending.num_waiters == 9)
        gate.wait(WAIT_S)
        assert sorted(count.result(WAIT_S) for count in counts) == [0] + [1999] * 9
        assert client.stats().prefill_tokens_computed == len(PROMPT) + 9


# ---- the sequence that computes ends


def _free(scene: Scene, peer: Peer, sequence_id: int) -> None:
    peer.free(sequence_id)


def _expire(scene: Scene, peer: Peer, sequence_id: int) -> None:
    scene.now_s[0] += OWNER_TTL_S
    scene.running.sweep()


def _close(scene: Scene, peer: Peer, sequence_id: int) -> None:
    scene.stubs.call("CloseSession", session_pb2.CloseSessionRequest(session_id=peer.owner))


def _truncate(scene: Scene, peer: Peer, sequence_id: int) -> None:
    peer.truncate(sequence_id, len(PROMPT), B - 1)


def _reset(scene: Scene, peer: Peer, sequence_id: int) -> None:
    scene.stubs.reset(force=True)


@pytest.mark.parametrize("end", [_free, _expire, _close, _truncate, _reset])
def test_one_of_those_that_wait_takes_over_and_the_others_wait_for_it(
    scene: Scene, end: Callable[[Scene, Peer, int], None]
) -> None:
    first = scene.session() if end is _close else Peer(scene.stubs)
    sequence_id = first.allocate(PROMPT).sequence_id
    first.commit(sequence_id, 0, 1000)
    calls = scene.waiting(3, PROMPT)
    end(scene, first, sequence_id)
    scene.until_waiting(2)
    until(lambda: any(future.done() for _, future in calls))
    ((heir, reply),) = [(peer, scene.stubs.finish(f)) for peer, f in calls if f.done()]
    cached = reply.num_cached_tokens
    assert cached == (0 if end is _reset else 1000 // B * B)
    heir.commit(reply.sequence_id, cached, len(PROMPT) - cached)
    rest = [scene.stubs.finish(future) for _, future in calls]
    assert sorted(r.num_cached_tokens for r in rest) == [cached, 1999, 1999]
    alive = 4 if end in (_truncate, _reset) else 3
    scene.check_nothing_waits(alive)


# ---- waits end


def test_a_wait_ends_at_its_deadline_and_is_no_error(scene: Scene) -> None:
    Peer(scene.stubs).allocate(PROMPT)
    peer = Peer(scene.stubs)
    reply = peer.allocate(PROMPT, wait_pending_ms=30)
    assert (reply.num_cached_tokens, reply.num_pending_tokens) == (0, 1999)
    assert len(reply.block_ids) == 125
    scene.check_nothing_waits(2)


def test_nothing_is_waited_for_that_nobody_computes(scene: Scene) -> None:
    peer = Peer(scene.stubs)
    assert peer.allocate(PROMPT, wait_pending_ms=LONG_MS).num_pending_tokens == 0
    assert peer.allocate(OTHER, wait_pending_ms=LONG_MS).num_pending_tokens == 0
    no_read = cache_pb2.CACHE_USE_NO_READ
    peer.allocate(PROMPT, wait_pending_ms=LONG_MS, cache_use=no_read)
    scene.check_nothing_waits(3)


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_caller_that_has_gone_leaves_nothing_behind(scene: Scene, how: str) -> None:
    first = Peer(scene.stubs)
    sequence_id = first.allocate(PROMPT).sequence_id
    if how == "cancelled":
        calls = scene.waiting(3, PROMPT)
        for _, future in calls:
            future.cancel()
    else:
        future = scene.start(PROMPT, timeout_s=2.0)
        scene.until_waiting(1)
        with pytest.raises(Refused) as refused:
            scene.stubs.finish(future)
        assert refused.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    scene.until_waiting(0)
    first.commit(sequence_id, 0, len(PROMPT))
    scene.check_nothing_waits(1)


def test_a_wait_ends_with_its_session(scene: Scene) -> None:
    Peer(scene.stubs).allocate(PROMPT)
    peer = scene.session()
    future = scene.start(PROMPT, peer)
    scene.until_waiting(1)
    _close(scene, peer, 0)
    with pytest.raises(Refused) as refused:
        scene.stubs.finish(future)
    assert refused.value.reason == "SESSION_NOT_FOUND"
    scene.check_nothing_waits(1)


def test_a_daemon_that_stops_ends_waits_at_once() -> None:
    with served(max_workers=1) as scene:
        Peer(scene.stubs).allocate(PROMPT)
        calls = scene.waiting(5, PROMPT)
        assert scene.running.server.stop(drain_timeout_s=LONG_MS / 1000)
        for _, future in calls:
            with pytest.raises(Refused) as refused:
                scene.stubs.finish(future)
            assert refused.value.reason == "DRAINING"


def test_copies_of_one_allocate_that_both_wait_make_one_sequence(scene: Scene) -> None:
    first, peer = Peer(scene.stubs), Peer(scene.stubs)
    sequence_id = first.allocate(PROMPT).sequence_id
    copies = [scene.start(PROMPT, peer, request_id="r") for _ in range(2)]
    scene.until_waiting(2)
    first.commit(sequence_id, 0, len(PROMPT))
    replies = [scene.stubs.finish(copy) for copy in copies]
    assert replies[0] == replies[1]
    scene.check_nothing_waits(2)


# ---- waits and others


def test_waiting_calls_keep_no_worker_from_others(scene: Scene) -> None:
    """A hundred wait; there are two workers."""
    first = Peer(scene.stubs)
    sequence_id = first.allocate(PROMPT).sequence_id
    calls = scene.waiting(100, PROMPT)
    assert scene.stubs.lookup(PROMPT).num_pending_tokens == 1999
    assert scene.stubs.stats().sequences == 1
    first.commit(sequence_id, 0, len(PROMPT))
    for _, future in calls:
        assert scene.stubs.finish(future).num_cached_tokens == 1999
    scene.check_nothing_waits(101)


def test_no_more_calls_wait_than_may() -> None:
    with served(max_pending_waits=2) as scene:
        Peer(scene.stubs).allocate(PROMPT)
        calls = scene.waiting(2, PROMPT)
        reply = Peer(scene.stubs).allocate(PROMPT, wait_pending_ms=LONG_MS)
        assert (reply.num_cached_tokens, reply.num_pending_tokens) == (0, 1999)
        calls[0][1].cancel()
        scene.until_waiting(1)
        calls += scene.waiting(1, PROMPT)
        for _, future in calls[1:]:
            future.cancel()
        scene.check_nothing_waits(2)


def test_each_prompt_is_waited_for_by_itself(scene: Scene) -> None:
    """Two clients that each compute what the other waits for: neither wait holds up the other."""
    one, two = Peer(scene.stubs), Peer(scene.stubs)
    own, others = one.allocate(PROMPT).sequence_id, two.allocate(OTHER).sequence_id
    waits = [scene.start(OTHER, one), scene.start(PROMPT, two)]
    scene.until_waiting(2)
    two.commit(others, 0, len(OTHER))
    assert scene.stubs.finish(waits[0]).num_cached_tokens == len(OTHER) // B * B
    assert scene.num_waiting == 1
    one.commit(own, 0, len(PROMPT))
    assert scene.stubs.finish(waits[1]).num_cached_tokens == 1999
    scene.check_nothing_waits(4)


def test_two_that_wait_for_each_other_end_at_their_deadlines(scene: Scene) -> None:
    one, two = Peer(scene.stubs), Peer(scene.stubs)
    one.allocate(PROMPT)
    two.allocate(OTHER)
    waits = [
        scene.start(OTHER, one, wait_pending_ms=200),
        scene.start(PROMPT, two, wait_pending_ms=200),
    ]
    for wait in waits:
        assert scene.stubs.finish(wait).num_cached_tokens == 0
    scene.check_nothing_waits(4)


# ---- what is refused


@pytest.mark.parametrize(("longest_s", "asked_ms"), [(2.5, 2501), (0.0, 1), (60.0, 2**32 - 1)])
def test_longer_waits_than_the_daemon_allows_are_refused(longest_s: float, asked_ms: int) -> None:
    with served(max_wait_pending_s=longest_s) as scene:
        assert scene.stubs.info().limits.max_wait_pending_s == longest_s
        with pytest.raises(Refused) as refused:
            Peer(scene.stubs).allocate(PROMPT, wait_pending_ms=asked_ms)
        assert (refused.value.code, refused.value.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "wait_pending_ms",
        )
        Peer(scene.stubs).allocate(PROMPT, wait_pending_ms=int(longest_s * 1000))
        scene.check_nothing_waits(1)


def test_a_step_never_waits(scene: Scene) -> None:
    request = cache_pb2.AllocateRequest(owner=bytes(16), token_ids=PROMPT, wait_pending_ms=1)
    with scene.stubs.steps() as steps:
        reply = steps.run(cache_pb2.StepRequest(allocates=[request]))
    refused = refusals(reply)["allocates", 0]
    assert (refused.code, refused.field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "wait_pending_ms",
    )
    scene.check_nothing_waits(0)
