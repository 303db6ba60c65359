"""Many clients at once: whatever they do and however they leave, the books balance."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from prefixcache.rpc._pb import attention_pb2, cache_pb2, session_pb2
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.server.rpc_server import RpcServer
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import running_daemon
from tests.support.gate import held
from tests.support.invariants import check_invariants
from tests.support.stubs import METHODS, Peer, Refused, Stubs, connected

NUM_BLOCKS, BLOCK_SIZE = 24, 4
LAYOUT = KVLayout(1, 1, 8, BLOCK_SIZE, "float32")
NUM_THREADS, CALLS_A_THREAD = 8, 120
EXPECTED = {
    "NO_ROOM",
    "NOT_COMPUTED",
    "SEQUENCE_BUSY",
    "SEQUENCE_NOT_FOUND",
    "WRONG_POSITION",
    "BLOCKS_IN_USE",
    "BEYOND_TOKENS",
    "INVALID_ARGUMENT",  # a Truncate to a length that another thread has made too long
}


class Hammer:
    """One thread's random calls on sequences that other threads of its owner use too."""

    def __init__(
        self, target: str, owner: bytes, shared: list[tuple[int, int]], seed: int, stored: bool
    ) -> None:
        self._target, self._owner, self._shared = target, owner, shared
        self._random = random.Random(seed)
        self._stored = stored

    def run(self) -> None:
        with connected(self._target) as stubs:
            peer = Peer(stubs, self._owner)
            for _ in range(CALLS_A_THREAD):
                try:
                    self._call(peer)
                except Refused as refusal:
                    assert refusal.reason in EXPECTED, refusal

    def _call(self, peer: Peer) -> None:
        choose = self._random
        if not self._shared or choose.random() < 0.25:
            tokens = [choose.randrange(2)] * choose.randrange(1, 20)
            reply = peer.allocate(tokens, num_lookahead_tokens=choose.randrange(4))
            self._shared.append((reply.sequence_id, len(tokens)))
            return
        sequence_id, n = choose.choice(self._shared)
        calls: list[Callable[[], object]] = [
            lambda: self._compute(peer, sequence_id, n),
            lambda: self._compute(peer, sequence_id, n),
            lambda: peer.append(sequence_id, n, [1, 2, 3]),
            lambda: self._shared.extend((i, n) for i in peer.fork(sequence_id, n)),
            lambda: peer.truncate(sequence_id, n, max(1, n - 3)),
            lambda: peer.free(sequence_id),
            lambda: peer.free(sequence_id, sequence_id),
            lambda: peer.stubs.lookup([0] * 10),
            lambda: peer.stubs.stats(),
            lambda: peer.stubs.reset(force=choose.random() < 0.1),
        ]
        choose.choice(calls)()

    def _compute(self, peer: Peer, sequence_id: int, n: int) -> None:
        if not self._stored:
            peer.commit(sequence_id, 0, n)
            return
        tensor = attention_pb2.Tensor(
            data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=[n, 1, 8], data=bytes(n * 8 * 4)
        )
        name = self._random.choice(["Prefill", "Decode"])
        request = METHODS[name].request(
            batch=peer.batch(0, [(sequence_id, 0, n)]), q=tensor, k=tensor, v=tensor
        )
        peer.stubs.call(name, request)


@pytest.mark.parametrize("stored", [False, True], ids=["bare", "stored"])
def test_the_books_balance_after_many_threads_did_as_they_liked(stored: bool) -> None:
    model = ModelOptions(LAYOUT) if stored else None
    owners = [bytes([number]) * 16 for number in range(3)]
    shared: list[list[tuple[int, int]]] = [[] for _ in owners]
    with running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE), model) as running:
        hammers = [
            Hammer(running.target, owners[n % 3], shared[n % 3], seed=n, stored=stored)
            for n in range(NUM_THREADS)
        ]
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for future in [threads.submit(hammer.run) for hammer in hammers]:
                future.result()
        sequences = running.daemon.sequences
        with sequences.lock:
            check_invariants(sequences)
        with connected(running.target) as stubs:
            for owner, used in zip(owners, shared, strict=True):
                Peer(stubs, owner).free(*{sequence_id for sequence_id, _ in used})
            stats = stubs.stats()
        assert (stats.sequences, stats.owners, stats.referenced) == (0, 0, 0)
        assert stats.evictable + stats.blank == NUM_BLOCKS
        assert stats.evictable == stats.cached
        assert stats.requests > NUM_THREADS and stats.queries_tokens > 0
        with sequences.lock:
            check_invariants(sequences)


def test_the_books_balance_after_64_clients_of_one_prefix_left_as_they_liked() -> None:
    num_clients, prefix = 64, list(range(20))

    def client(target: str, seed: int) -> None:
        """Some free what they have, some close their session, some just go, in a call or not."""
        choose = random.Random(seed)
        with connected(target) as stubs:
            session = stubs.call("OpenSession", session_pb2.OpenSessionRequest(ttl_s=60))
            peer = Peer(stubs, session.session_id)
            for turn in range(choose.randrange(1, 6)):
                tokens = prefix + [100 + seed, turn] * choose.randrange(1, 5)
                reply = peer.allocate(tokens)
                cached = reply.num_cached_tokens
                if choose.random() < 0.7:
                    peer.commit(reply.sequence_id, cached, len(tokens) - cached)
                if choose.random() < 0.4:
                    peer.free(reply.sequence_id)
            if choose.random() < 0.3:
                closing = session_pb2.CloseSessionRequest(session_id=session.session_id)
                stubs.call("CloseSession", closing)
            elif choose.random() < 0.5:
                request = cache_pb2.AllocateRequest(owner=session.session_id, token_ids=prefix)
                stubs.start("Allocate", request).cancel()

    now_s = 0.0
    # Room for all that 64 clients can hold at once, and too little for what they leave cached.
    with running_daemon(CacheOptions(1200, BLOCK_SIZE), clock=lambda: now_s) as running:
        with ThreadPoolExecutor(num_clients) as threads:
            for done in [threads.submit(client, running.target, n) for n in range(num_clients)]:
                done.result()
        sequences = running.daemon.sequences
        with connected(running.target) as stubs:
            stats = stubs.stats()
            assert stats.sessions > 10 and stats.referenced > 10
            assert stats.hit_tokens > 0
            now_s = 61.0
            running.sweep()
            stats = stubs.stats()
        assert (stats.sessions, stats.sequences, stats.referenced, stats.quarantined) == (0,) * 4
        assert stats.evictable + stats.blank == stats.num_blocks
        assert 0 < stats.evictable == stats.cached < stats.num_blocks
        with sequences.lock:
            check_invariants(sequences)


def test_a_sequence_that_many_free_at_once_is_freed_once() -> None:
    with running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE)) as running:
        with connected(running.target) as stubs:
            peer = Peer(stubs)
            ids = [peer.allocate([n] * 6).sequence_id for n in range(10)]
            with ThreadPoolExecutor(NUM_THREADS) as threads:
                replies = list(threads.map(lambda _: peer.free(*ids), range(NUM_THREADS)))
            for codes in zip(*replies, strict=True):
                assert sorted(codes) == [
                    cache_pb2.RESULT_CODE_OK,
                    *[cache_pb2.RESULT_CODE_NOT_FOUND] * (NUM_THREADS - 1),
                ]
            assert stubs.stats().blank == NUM_BLOCKS
        with running.daemon.sequences.lock:
            check_invariants(running.daemon.sequences)


def test_calls_that_run_out_of_time_are_done_whole_or_not_at_all() -> None:
    cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, owner_ttl_s=0.0)
    # One worker: when a last call is answered, those before it have ended, one way or the other.
    with running_daemon(cache, max_workers=1) as running:
        sequences = running.daemon.sequences
        with connected(running.target) as stubs:
            with held(sequences, "prepare"):
                codes = [allocate_in(stubs, 0.05)]
            assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
            codes += [allocate_in(stubs, 0.0001 * (1 + n % 50)) for n in range(300)]
            assert set(codes) <= {
                grpc.StatusCode.OK,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            }
            num_held = stubs.stats().sequences
        with sequences.lock:
            check_invariants(sequences)
        assert num_held >= codes.count(grpc.StatusCode.OK)
        assert sequences.expire() == num_held
        assert sequences.pool.num_blank == NUM_BLOCKS
        with sequences.lock:
            check_invariants(sequences)


def allocate_in(stubs: Stubs, timeout_s: float) -> grpc.StatusCode:
    request = cache_pb2.AllocateRequest(owner=bytes(16), token_ids=range(6))
    try:
        stubs.call("Allocate", request, timeout_s)
    except Refused as refusal:
        return refusal.code
    return grpc.StatusCode.OK


def test_silent_owners_lose_their_sequences_and_no_one_else_does() -> None:
    """What counts is the last call of an owner, on any sequence; the clock is turned by hand."""
    now_s = 0.0
    cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, owner_ttl_s=10.0)
    daemon = Daemon(cache, clock=lambda: now_s)
    server = RpcServer(daemon, max_workers=2)
    target = server.listen("127.0.0.1:0")
    server.start()
    with connected(target) as stubs:
        silent, busy = Peer(stubs), Peer(stubs)
        ids = [peer.allocate([n] * 5).sequence_id for n, peer in enumerate([silent, busy])]
        kept = busy.allocate([9] * 5).sequence_id
        now_s = 9.0
        assert daemon.sequences.expire() == 0
        # Refused, and a sign of life all the same.
        assert busy.append(ids[1], 0, [1]).code == cache_pb2.RESULT_CODE_WRONG_POSITION
        now_s = 10.0
        assert daemon.sequences.expire() == 1
        assert silent.free(ids[0]) == [cache_pb2.RESULT_CODE_NOT_FOUND]
        assert busy.append(kept, 5, [1]).code == cache_pb2.RESULT_CODE_OK
        now_s = 20.0
        assert daemon.sequences.expire() == 2
        stats = stubs.stats()
        assert (stats.expired_sequences, stats.sequences, stats.referenced) == (3, 0, 0)
        assert stats.uptime_s == 20.0
    server.stop(1.0)


def test_a_call_whose_caller_gave_up_before_a_worker_was_free_changes_nothing() -> None:
    with (
        running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE), max_workers=1) as running,
        connected(running.target) as stubs,
    ):
        sequences = running.daemon.sequences
        with held(sequences, "stats") as gate:
            working = stubs.start("GetStats", METHODS["GetStats"].request())
            gate.wait()
            request = cache_pb2.AllocateRequest(owner=b"o" * 16, token_ids=range(10))
            with pytest.raises(Refused) as caught:
                stubs.call("Allocate", request, timeout_s=0.3)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            # The daemon counts a deadline from the arrival of the call. Once a later call has
            # passed its own here, the first has passed its there.
            with pytest.raises(Refused):
                stubs.call("Lookup", cache_pb2.LookupRequest(token_ids=[1]), timeout_s=0.3)
        stubs.finish(working)
        # The only worker takes calls in turn: after this one, it is through with the other.
        stats = stubs.stats()
        assert (stats.requests, stats.sequences, stats.referenced) == (0, 0, 0)
        with sequences.lock:
            check_invariants(sequences)
