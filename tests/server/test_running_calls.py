"""What may happen to a sequence while a call on it is running: its blocks stay where they are.

The call is held at a gate inside the daemon, so nothing here depends on time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions, ModelOptions
from tests.support.daemon import running_daemon
from tests.support.held_calls import BLOCK_SIZE, LAYOUT, NUM_BLOCKS, Served, copying, finished
from tests.support.stubs import Peer, Refused, Row, connected, read_append
from tests.support.toy_model import (
    Run,
    attention_request,
    bytes_of,
    compute_batch,
    poison,
)
from tests.support.waiting import WAIT_S

CACHE = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, owner_ttl_s=0.0)
LAST_LAYER = LAYOUT.num_layers - 1
OK, BUSY = cache_pb2.RESULT_CODE_OK, cache_pb2.RESULT_CODE_BUSY
METHODS = ["Prefill", "Decode"]


@pytest.fixture
def served() -> Iterator[Served]:
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT)) as running,
        connected(running.target) as stubs,
    ):
        yield Served(running, stubs)


# ---- the end of a sequence


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
def test_blocks_of_a_freed_sequence_stay_until_its_running_call_has_ended(
    served: Served, name: str, layer: int
) -> None:
    run = served.run(range(8))
    for below in range(layer):
        run.compute_layer(below)
    with served.running(name, layer, run, 8) as call:
        run.free()
        assert run.peer.free(run.sequence_id) == [cache_pb2.RESULT_CODE_NOT_FOUND]
        assert served.stubs.stats().sequences == 0
        assert served.stubs.stats().referenced == 2
        assert not served.free_blocks() & set(run.block_ids)
        # Whoever takes all the room there is does not get them.
        taker = served.run(range(100, 100 + (NUM_BLOCKS - 2) * BLOCK_SIZE))
        assert not set(taker.block_ids) & set(run.block_ids)
        refusal = served.stubs.refused(
            "Allocate", cache_pb2.AllocateRequest(owner=taker.peer.owner, token_ids=[1])
        )
        assert (refusal.reason, refusal.numbers["referenced"]) == ("NO_ROOM", str(NUM_BLOCKS))
        served.check()
        call.finish()
    assert served.free_blocks() == set(run.block_ids)
    assert served.stubs.stats().blank == 2
    assert served.found(range(8)) == 0
    served.check()


def test_a_sequence_that_was_freed_during_its_last_call_registers_nothing(served: Served) -> None:
    run = served.run(range(12))
    run.compute(4)
    assert served.found(range(12)) == 4
    run.compute_layer(0)
    with served.running("Prefill", LAST_LAYER, run, 8) as call:
        run.free()
        call.finish()
    assert served.found(range(12)) == 4
    assert (served.stubs.stats().evictable, served.stubs.stats().blank) == (1, NUM_BLOCKS - 1)


@pytest.mark.parametrize("name", METHODS)
def test_a_forced_reset_leaves_a_running_call_its_blocks(served: Served, name: str) -> None:
    run = served.run(range(9))
    run.compute(4)
    run.compute_layer(0)
    with served.running(name, LAST_LAYER, run, 5) as call:
        refusal = served.stubs.refused("ResetCache", b"")
        assert (refusal.reason, refusal.numbers["referenced"]) == ("BLOCKS_IN_USE", "3")
        assert served.stubs.reset(force=True) == 1
        assert not served.free_blocks() & set(run.block_ids)
        call.finish()
    assert served.found(range(8)) == 0
    # It lives on, and neither it nor a fork of it registers anything.
    child = run.forked(run.peer.fork(run.sequence_id, 9)[0])
    for side in (run, child):
        side.append([1, 2, 3])
        side.compute(name="Decode")
        side.free()
    assert served.stubs.stats().blank == NUM_BLOCKS
    # The next sequence with the same tokens does.
    again = served.run(range(8))
    assert again.num_cached_tokens == 0
    again.compute()
    assert served.found(range(8)) == 8
    served.check()


@pytest.mark.parametrize("name", METHODS)
def test_an_owner_with_a_running_call_does_not_expire(served: Served, name: str) -> None:
    run, other = served.run(range(8)), served.run(range(20, 24))

    def expire() -> int:
        with served.sequences.lock:
            return served.sequences.expire()

    with served.running(name, 0, run, 8) as call:
        assert expire() == 1
        assert other.peer.free(other.sequence_id) == [cache_pb2.RESULT_CODE_NOT_FOUND]
        assert not served.free_blocks() & set(run.block_ids)
        call.finish()
    run.compute_layer(LAST_LAYER)
    assert expire() == 1
    assert served.stubs.stats().expired_sequences == 2
    assert served.stubs.stats().evictable == 2
    refusal = served.stubs.refused(
        "Truncate",
        cache_pb2.TruncateRequest(
            owner=run.peer.owner,
            sequence_id=run.sequence_id,
            num_tokens_before=8,
            num_tokens_after=8,
        ),
    )
    assert refusal.code is grpc.StatusCode.NOT_FOUND


# ---- other calls on it


@pytest.mark.parametrize("name", METHODS)
def test_other_calls_on_the_sequence_are_aborted_meanwhile(served: Served, name: str) -> None:
    peer = Peer(served.stubs)
    run, idle = served.run(range(6), peer), served.run(range(10, 14), peer)
    with served.running(name, 0, run, 6) as call:
        assert peer.append(run.sequence_id, 6, [1]).code == BUSY
        # A row of its own for each: the other sequence goes on.
        both = peer.append_rows([Row(run.sequence_id, 6, (1,)), Row(idle.sequence_id, 4, (1,))])
        assert [row.code for row in both] == [BUSY, OK]
        for refusal in (
            refusal_of(lambda: peer.truncate(run.sequence_id, 6, 5)),
            refusal_of(lambda: peer.fork(run.sequence_id, 6)),
            *(
                served.stubs.refused(method, attention_request(method, 0, [(run, count)]))
                for method in METHODS
                for count in (6, 1)
            ),
            served.stubs.refused(name, attention_request(name, 0, [(idle, 4), (run, 6)])),
        ):
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "SEQUENCE_BUSY")
            assert refusal.numbers["sequence_id"] == str(run.sequence_id)
        call.finish()
    compute_batch(0, [(idle, 4)], name)
    run.compute_layer(LAST_LAYER)
    assert peer.append(run.sequence_id, 6, [1]).code == OK
    served.check()


def test_another_layer_may_run_at_the_same_time(served: Served) -> None:
    run = served.run(range(6))
    with served.running("Prefill", 0, run, 6) as call:
        run.compute_layer(1, name="Decode")
        assert served.found(range(4)) == 0
        call.finish()
    assert served.found(range(4)) == 4


@pytest.mark.parametrize("num_layers_done", [0, 1])
def test_what_one_layer_finishes_does_not_end_the_wait_for_another(
    served: Served, num_layers_done: int
) -> None:
    run = served.run(range(6))
    with served.running("Prefill", 0, run, 6) as call:
        for layer in range(1, 1 + num_layers_done):
            run.compute_layer(layer, name="Decode")
        assert run.peer.append(run.sequence_id, 6, [1]).code == BUSY
        call.finish()
    assert run.peer.append(run.sequence_id, 6, [1]).code == OK


def test_a_long_prefill_delays_nobody_else(served: Served) -> None:
    run = served.run(range(6))
    with served.running("Prefill", 0, run, 6) as call:
        other = served.run(range(20, 29))
        other.compute(name="Decode")
        assert served.found(range(20, 28)) == 8
        other.free()
        assert served.stubs.stats().sequences == 1
        call.finish()


# ---- copy-on-write


def test_the_source_of_a_copy_stays_until_it_is_made(served: Served) -> None:
    with copying(served) as (parent, child, gate, future):
        source = child.block_ids[1]
        before = bytes_of(served.daemon, [source])
        child.free()
        taker = served.run(range(100, 100 + BLOCK_SIZE * len(served.free_blocks())))
        assert source not in taker.block_ids
        poison(served.daemon)
        assert finished(served, gate, future)[0] == source
        destination = served.sequences.live.find(parent.peer.owner, parent.sequence_id).block_table[
            1
        ]
        assert bytes_of(served.daemon, [destination]) == before
        assert source in served.free_blocks()
    parent.tokens += [70, 71]
    parent.compute(name="Decode")
    served.check()


def test_a_copy_goes_on_when_its_own_sequence_is_freed(served: Served) -> None:
    with copying(served) as (parent, child, gate, future):
        parent.free()
        assert served.stubs.stats().sequences == 1
        table_and_source = 3  # the shared full block, the destination, and the source
        assert served.stubs.stats().referenced == table_and_source
        _, destination = finished(served, gate, future)
        assert destination in served.free_blocks()
    assert served.stubs.stats().referenced == 2
    assert child.append([80]) == (), "the child has its last block for itself again"
    child.compute(name="Decode")
    served.check()


def test_a_sequence_is_busy_while_a_block_of_it_is_copied(served: Served) -> None:
    with copying(served) as (parent, child, gate, future):
        peer = parent.peer
        assert peer.append(parent.sequence_id, 8, [1]).code == BUSY
        assert peer.append(parent.sequence_id, 6, [70, 71]).code == BUSY, "not even a repeat"
        for refusal in (
            refusal_of(lambda: peer.truncate(parent.sequence_id, 8, 7)),
            refusal_of(lambda: peer.fork(parent.sequence_id, 8)),
            *(
                served.stubs.refused(name, next_token(parent, name, layer))
                for name in METHODS
                for layer in range(LAYOUT.num_layers)
            ),
        ):
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "SEQUENCE_BUSY")
        # The other side is not: it gets a copy of its own, as the source is still held.
        append = peer.append_request([Row(child.sequence_id, 6, (80,))])
        of_the_child = served.stubs.start("Append", append)
        gate.wait()
        source, destination = finished(served, gate, future)
        ((own_source, own_destination),) = read_append(served.stubs.finish(of_the_child))[0].copies
        assert source == own_source == child.block_ids[1]
        assert len({source, destination, own_destination}) == 3
    served.check()


def next_token(run: Run, name: str, layer: int) -> Any:
    longer = Run(
        run.peer, run.model, [*run.tokens, 70], run.sequence_id, positions=list(run.positions)
    )
    return attention_request(name, layer, [(longer, 1)])


def test_a_reset_during_a_copy_leaves_both_blocks(served: Served) -> None:
    with copying(served) as (parent, child, gate, future):
        served.stubs.reset(force=True)
        _, destination = finished(served, gate, future)
        assert destination not in served.free_blocks()
    parent.tokens += [70, 71]
    parent.compute(name="Decode")
    child.append([80])
    child.compute(name="Decode")
    assert served.stubs.stats().cached == 0
    served.check()


def test_an_owner_does_not_expire_during_a_copy(served: Served) -> None:
    with copying(served) as (_, _, gate, future):
        with served.sequences.lock:
            assert served.sequences.expire() == 0
        finished(served, gate, future)
    with served.sequences.lock:
        assert served.sequences.expire() == 2
    assert served.stubs.stats().referenced == 0


def refusal_of(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def test_attention_in_every_worker_delays_no_other_call() -> None:
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT), max_workers=1) as running,
        connected(running.target) as stubs,
    ):
        served = Served(running, stubs)
        run = served.run(range(6))
        with served.running("Prefill", 0, run, 6) as call:
            assert served.found(range(6)) == 0
            assert health_of(running.target) == health_pb2.HealthCheckResponse.SERVING
            call.finish()


def health_of(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status
        return status
