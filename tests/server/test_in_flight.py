"""Blocks that a running call reads or writes outlive whatever ends their sequence meanwhile.

A kernel, or the copy of a copy-on-write, is held in the middle; then the sequence ends in one of
the ways in which one can, or is only in others' way, while another client takes every block that is
free and writes into it. Nothing here depends on time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from prefixcache.core.sessions import SessionLimits
from prefixcache.rpc._pb import session_pb2
from prefixcache.server.daemon import CacheOptions, ModelOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.held_calls import BLOCK_SIZE, LAYOUT, NUM_BLOCKS, Served, copying, finished
from tests.support.stubs import Peer, Row, connected
from tests.support.toy_model import Run, bytes_of

TTL_S, GRACE_S = 10.0, 2.0
LAST_LAYER = LAYOUT.num_layers - 1


@dataclass
class Scene:
    """One session with all that runs, and the time."""

    served: Served
    running: RunningDaemon
    peer: Peer
    now_s: float = 0.0

    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        self.running.sweep()

    def break_stream(self) -> None:
        sessions = self.served.sequences.live.sessions
        with self.served.sequences.lock:
            sessions.disconnect(self.peer.owner, sessions.connect(self.peer.owner))
        self.expire(GRACE_S)

    def close(self) -> None:
        request = session_pb2.CloseSessionRequest(session_id=self.peer.owner)
        self.served.stubs.call("CloseSession", request)

    def take_all_free_blocks(self, name: str) -> Run:
        """Another client's sequence in every block that is free, with K/V of its own in them.

        name: the attention call to use, which must not be the one that is held.
        """
        num_free = len(self.served.free_blocks())
        taker = self.served.run(range(1000, 1000 + num_free * BLOCK_SIZE), cache_use=4)
        taker.compute(name=name)
        return taker


@pytest.fixture
def scene() -> Iterator[Scene]:
    made: list[Scene] = []
    limits = SessionLimits(reconnect_grace_s=GRACE_S)
    with (
        running_daemon(
            CacheOptions(NUM_BLOCKS, BLOCK_SIZE),
            ModelOptions(LAYOUT),
            None,
            limits,
            clock=lambda: made[0].now_s if made else 0.0,
        ) as running,
        connected(running.target) as stubs,
    ):
        request = session_pb2.OpenSessionRequest(ttl_s=TTL_S)
        peer = Peer(stubs, stubs.call("OpenSession", request).session_id)
        made.append(Scene(Served(running, stubs), running, peer))
        yield made[0]


ENDS: dict[str, Callable[[Scene, Run], object]] = {
    "Free": lambda scene, run: run.free(),
    "expiry": lambda scene, run: scene.expire(TTL_S),
    "broken stream": lambda scene, run: scene.break_stream(),
    "CloseSession": lambda scene, run: scene.close(),
}
OTHERS: dict[str, Callable[[Scene, Run], object]] = {
    "forced reset": lambda scene, run: scene.served.stubs.reset(force=True),
    "eviction": lambda scene, run: None,
}


@pytest.mark.parametrize("end", ENDS | OTHERS)
@pytest.mark.parametrize(("name", "other"), [("Prefill", "Decode"), ("Decode", "Prefill")])
def test_a_running_attention_call_keeps_its_blocks(
    scene: Scene, name: str, other: str, end: str
) -> None:
    served = scene.served
    # Its first block is a hit on what somebody else has left: evictable but for this sequence.
    served.run(range(BLOCK_SIZE)).compute()
    run = served.run(range(10), scene.peer)
    assert run.num_cached_tokens == BLOCK_SIZE
    run.compute_layer(0)
    with served.running(name, LAST_LAYER, run, 10 - BLOCK_SIZE) as call:
        (ENDS | OTHERS)[end](scene, run)
        assert not served.free_blocks() & set(run.block_ids)
        taker = scene.take_all_free_blocks(other)
        assert not set(taker.block_ids) & set(run.block_ids)
        served.check()
        call.finish()  # and its output is the exact one
    served.check()
    if end in ENDS:
        # The hit has another holder, which computed it.
        assert served.free_blocks() == set(run.block_ids[1:])
        assert served.found(range(10)) == BLOCK_SIZE
    else:
        assert not served.free_blocks() & set(run.block_ids)
        run.append([1])
        run.compute(name=name)


@pytest.mark.parametrize("end", ENDS | OTHERS)
def test_a_running_copy_keeps_its_blocks(scene: Scene, end: str) -> None:
    served = scene.served
    with copying(served, scene.peer) as (parent, child, gate, future):
        source = child.block_ids[1]
        before = bytes_of(served.daemon, [source])
        child.free()  # so that the copy alone holds its source
        (ENDS | OTHERS)[end](scene, parent)
        taker = scene.take_all_free_blocks("Prefill")
        assert source not in taker.block_ids
        assert not set(parent.block_ids) & set(taker.block_ids)
        served.check()
        copied, destination = finished(served, gate, future)
        assert copied == source
        assert bytes_of(served.daemon, [destination]) == before
    served.check()
    assert source in served.free_blocks()
    assert (destination in served.free_blocks()) == (end in ENDS)
    if end in OTHERS:
        parent.tokens += [70, 71]
        parent.compute(name="Decode")


@pytest.mark.parametrize("end", ENDS)
def test_late_calls_of_an_ended_sequence_write_into_no_block(scene: Scene, end: str) -> None:
    """Its blocks are others' by then."""
    served = scene.served
    run = served.run(range(10), scene.peer)
    run.compute_layer(0)
    with served.running("Prefill", LAST_LAYER, run, 10) as call:
        ENDS[end](scene, run)
        call.finish()
    taker = scene.take_all_free_blocks("Prefill")
    assert set(run.block_ids) <= set(taker.block_ids)
    before = bytes_of(served.daemon)
    late = run.peer.append_request([Row(run.sequence_id, 10, (1,))])
    if end == "Free":
        assert list(served.stubs.call("Append", late).result_codes) == [2]
    else:
        assert served.stubs.refused("Append", late).reason == "SESSION_NOT_FOUND"
    assert bytes_of(served.daemon) == before
    served.check()
