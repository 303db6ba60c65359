"""A view is of use as long as its session and its daemon live, and no result is returned after."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefixcache import AsyncClient, Client, errors
from prefixcache.attached import attach, attach_async, pool_view
from prefixcache.attached.pool_view import PoolView
from prefixcache.client import Sequence
from prefixcache.types import PoolAccess, ResultCode
from tests.attached.served import KINDS, NUM_LAYERS, OPTIONS, Served, compute, serve
from tests.support.gate import held
from tests.support.waiting import until


def pool_mappings() -> list[str]:
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return [line for line in maps.splitlines() if "prefixcache-kv" in line]


def full_hit(served: Served) -> tuple[Client, PoolView, object]:
    """A sequence whose next token needs no writing."""
    client, view = served.attached()
    first = client.sequence(range(8))
    compute(view, first, served.steps(8))
    first.commit(8)
    return client, view, client.sequence(range(8))


ENDS: dict[str, Callable[[Served, Client], None]] = {
    "expiry": lambda served, client: served.end_session(),
    "the client's end": lambda served, client: client.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_after_the_sessions_end_every_call_is_refused(served: Served, end: str) -> None:
    client, view, sequence = full_hit(served)
    assert view.is_valid
    ENDS[end](served, client)
    before = served.spans.clone()
    assert not view.is_valid
    for call in (
        view.check,
        lambda: view.layer(0),
        lambda: view.decode(0, [sequence], *served.tensors(1), OPTIONS),
    ):
        with pytest.raises(errors.SessionLostError):
            call()
    assert torch.equal(served.spans, before)


def test_a_result_over_blocks_that_may_be_anothers_by_now_is_refused(served: Served) -> None:
    client, view, sequence = full_hit(served)
    errors_seen: list[BaseException] = []

    def decode() -> None:
        try:
            view.decode(0, [sequence], *served.tensors(1), OPTIONS)
        except errors.PrefixCacheError as error:
            errors_seen.append(error)

    with held(pool_view, "decode") as gate:
        running = threading.Thread(target=decode)
        running.start()
        gate.wait()
        served.end_session()
        gate.release()
        running.join()
    assert [type(error) for error in errors_seen] == [errors.SessionLostError]
    assert client.sequence([1]).num_cached_tokens == 0  # in another session


MOVES: dict[str, Callable[[Client, Sequence], object]] = {
    "free": lambda client, sequence: sequence.free(),
    "frees": lambda client, sequence: client.free([client.sequence([1]), sequence]),
    "append": lambda client, sequence: sequence.append([1]),
    "truncate": lambda client, sequence: sequence.truncate(5),
    "fork": lambda client, sequence: sequence.fork(),
}


@pytest.mark.parametrize("move", MOVES)
def test_no_block_is_given_away_while_a_call_may_write_there(served: Served, move: str) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(11))
    results: list[torch.Tensor] = []

    def prefill() -> None:
        results.append(view.prefill(0, [sequence], [11], *served.tensors(11), OPTIONS))

    with held(pool_view, "write_kv") as gate:
        running = threading.Thread(target=prefill)
        running.start()
        gate.wait()
        with pytest.raises(errors.SequenceBusyError):
            MOVES[move](client, sequence)
        gate.release()
        running.join()
    assert len(results) == 1
    assert not sequence.is_freed
    sequence.free()
    assert sequence.is_freed


def test_nothing_is_written_to_a_sequence_that_was_freed(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(11))
    view.prefill(0, [sequence], [11], *served.tensors(11), OPTIONS)
    sequence.free()
    before = served.spans.clone()
    with pytest.raises(errors.SequenceNotFoundError):
        view.prefill(1, [sequence], [11], *served.tensors(11), OPTIONS)
    assert torch.equal(served.spans, before)


UNANSWERED: dict[str, Callable[[Sequence, float], object]] = {
    "free": lambda sequence, timeout_s: sequence.free(timeout_s=timeout_s),
    "truncate": lambda sequence, timeout_s: sequence.truncate(5, timeout_s=timeout_s),
    "append": lambda sequence, timeout_s: sequence.append([1], timeout_s=timeout_s),
}


@pytest.mark.parametrize("move", UNANSWERED)
def test_nothing_is_written_while_it_is_not_known_whose_blocks_they_are(
    served: Served, move: str
) -> None:
    """The daemon may have given some of them to others."""
    client, view = served.attached()
    sequence = client.sequence(range(11))
    view.prefill(0, [sequence], [11], *served.tensors(11), OPTIONS)
    before = served.spans.clone()
    with served.running.daemon.sequences.lock, pytest.raises(errors.DeadlineExceededError):
        UNANSWERED[move](sequence, 0.05)
    with pytest.raises(errors.SequenceBusyError):
        view.prefill(1, [sequence], [5], *served.tensors(5), OPTIONS)
    assert torch.equal(served.spans, before)
    UNANSWERED[move](sequence, 20.0)
    if move != "free":
        view.prefill(1, [sequence], [5], *served.tensors(5), OPTIONS)


def test_a_call_that_was_refused_stands_in_no_views_way(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(11))
    with pytest.raises(errors.InvalidArgumentError):
        sequence.truncate(0)
    with pytest.raises((errors.NoRoomError, errors.ExceedsPoolError)):
        sequence.append(range(200))
    assert len(compute(view, sequence, served.steps(11))) == NUM_LAYERS


def test_a_step_under_way_and_a_views_call_exclude_each_other(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(11))
    with client.steps() as steps, held(pool_view, "write_kv") as gate:
        step = steps.new_step()
        step.append([sequence], [[5]])
        arguments = (0, [sequence], [11], *served.tensors(11), OPTIONS)
        running = threading.Thread(target=view.prefill, args=arguments)
        running.start()
        gate.wait()
        with pytest.raises(errors.SequenceBusyError):
            steps.send(step)
        gate.release()
        running.join()
        step = steps.new_step()
        appended = step.append([sequence], [[5]])
        with served.running.daemon.sequences.lock:
            steps.send(step)
            with pytest.raises(errors.SequenceBusyError):
                view.prefill(1, [sequence], [11], *served.tensors(11), OPTIONS)
        steps.wait(step)
        assert appended.result()[0].code is ResultCode.OK
    view.prefill(1, [sequence], [12], *served.tensors(12), OPTIONS)


def test_blocks_of_a_live_sequence_are_not_evicted_under_a_reader(served: Served) -> None:
    """The sequence holds a reference on them, whatever others need."""
    client, view, sequence = full_hit(served)
    expected = [
        view.decode(layer, [sequence], *served.tensors(1), OPTIONS).shape
        for layer in range(NUM_LAYERS)
    ]
    held_blocks = served.span_bytes(sequence)
    other = served.client()
    with pytest.raises(errors.NoRoomError):
        for number in range(100):
            other.sequence(range(1000 * number, 1000 * number + 16))
    client.reset_cache(force=True)
    assert served.span_bytes(sequence) == held_blocks
    assert view.is_valid
    assert expected


def test_the_daemons_end_is_noticed() -> None:
    with serve("float32") as served:
        client = Client(served.running.target)
        view = attach(client)
        sequence = client.sequence(range(5))
        assert view.is_valid
    assert not view.is_valid
    with pytest.raises(errors.SessionLostError):
        view.decode(0, [sequence], *zeros(), OPTIONS)
    view.close()
    client.close()


def zeros() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = KINDS["float32"]
    k = torch.zeros(1, layout.num_kv_heads, layout.head_dim)
    return torch.cat([k, k], dim=1), k, k


def test_another_view_follows_one_that_was_lost(served: Served) -> None:
    client, view = served.attached()
    served.end_session()
    with pytest.raises(errors.SessionLostError):
        view.check()
    view.close()
    with attach(client) as again:
        sequence = client.sequence(range(6))
        compute(again, sequence, served.steps(6))
        assert sequence.commit(6).num_cached_blocks == 1


def test_a_sequence_of_the_session_before_is_refused(served: Served) -> None:
    client, view = served.attached()
    old = client.sequence(range(6))
    served.end_session()
    with pytest.raises(errors.SessionLostError):
        view.check()
    with attach(client) as again, pytest.raises(errors.FailedPreconditionError):
        again.decode(0, [old], *served.tensors(1), OPTIONS)


def test_close_unmaps_the_pool_and_leaves_no_descriptor(served: Served) -> None:
    client = served.client()
    client.server_info()
    client.sequence([1]).free()
    fds, mappings = len(os.listdir("/proc/self/fd")), len(pool_mappings())
    view = attach(client)
    assert len(pool_mappings()) == mappings + 1
    view.close()
    view.close()
    assert len(pool_mappings()) == mappings
    # The daemon, in this process, closes its end of the connection in its own time.
    until(lambda: len(os.listdir("/proc/self/fd")) == fds)
    assert not view.is_valid
    with pytest.raises(errors.FailedPreconditionError):
        view.check()


def test_close_waits_for_a_running_call_whose_result_is_good(served: Served) -> None:
    _, view, sequence = full_hit(served)
    results: list[torch.Tensor] = []
    with held(pool_view, "decode") as gate:
        running = threading.Thread(
            target=lambda: results.append(view.decode(0, [sequence], *served.tensors(1), OPTIONS))
        )
        running.start()
        gate.wait()
        closing = threading.Thread(target=view.close)
        closing.start()
        until(lambda: not view.is_valid)
        assert closing.is_alive()
        gate.release()
        running.join()
        closing.join()
    assert len(results) == 1


def test_what_was_computed_can_be_committed_after_close(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(8))
    compute(view, sequence, served.steps(8))
    view.close()
    assert sequence.commit(8).num_cached_blocks == 2


def test_a_view_of_an_address_has_a_client_of_its_own(served: Served) -> None:
    with attach(served.running.target) as view:
        assert view.client is not None
        sequence = view.client.sequence(range(8))
        compute(view, sequence, served.steps(8))
        sequence.commit(8)
    assert served.client().lookup(range(9)).num_cached_tokens == 8
    assert served.running.daemon.sequences.stats().sessions == 0


def test_a_forked_child_has_neither_the_memory_nor_the_view(served: Served) -> None:
    # In a process without the threads of a server.
    program = """
import os, sys
from prefixcache import Client, attach, errors
from tests.attached.test_validity import pool_mappings

client = Client(sys.argv[1])
view = attach(client)
own = len(pool_mappings())
child = os.fork()
if child == 0:
    code = 1
    try:
        view.check()
    except errors.ForkedClientError:
        code = 0 if not pool_mappings() and not view.is_valid else 2
    view.close()
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(pool_mappings()) == own > 0
assert view.is_valid
view.close()
assert client.sequence(range(4)).num_tokens == 4
"""
    subprocess.run([sys.executable, "-c", program, served.running.target], timeout=60, check=True)


def test_an_asyncio_client_has_the_same_view(served: Served) -> None:
    async def run() -> None:
        async with AsyncClient(served.running.target) as client:
            view = await attach_async(client)
            sequence = await client.sequence(range(8))
            compute(view, sequence, served.steps(8))
            assert (await sequence.commit(8)).num_cached_blocks == 2
            view.close()

    asyncio.run(run())


# ---- what cannot be attached


def test_without_a_session_there_is_no_view(served: Served) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        attach(served.client(session_ttl_s=None))
    assert caught.value.field == "session_ttl_s"


@pytest.mark.parametrize(
    ("limit", "writable", "is_granted"),
    [
        (PoolAccess.WRITE, True, True),
        (PoolAccess.WRITE, False, True),
        (PoolAccess.READ, True, False),
        (PoolAccess.READ, False, True),
    ],
)
def test_the_operator_says_how_far_it_goes(
    limit: PoolAccess, writable: bool, is_granted: bool
) -> None:
    with serve("float32", attach=limit) as served:
        client = served.client()
        assert "attach" in client.server_info().capabilities
        assert ("attach_write" in client.server_info().capabilities) is (limit is PoolAccess.WRITE)
        if is_granted:
            attach(client, writable=writable).close()
            return
        with pytest.raises(errors.AttachDeniedError) as caught:
            attach(client, writable=writable)
        assert caught.value.fields["access"] == "write"
        assert client.stats().attached_writers == 0


def test_a_daemon_that_gives_no_memory_says_so() -> None:
    with serve("float32", attach=PoolAccess.NONE) as served:
        client = served.client()
        assert "attach" not in client.server_info().capabilities
        with pytest.raises(errors.AttachDeniedError):
            attach(client)
