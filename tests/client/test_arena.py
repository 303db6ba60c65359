"""Large tensors by reference: the same results as in messages, whatever happens to the memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixcache import AsyncClient, Credentials, engine
from prefixcache.client import arena as client_arena
from prefixcache.client.arena import ALIGNMENT, Arena, Region
from prefixcache.client.tensors import HostView
from prefixcache.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    SequenceBusyError,
    SessionLostError,
    UnavailableError,
)
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.server.access import AccessControl, OpenAccess
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions, Daemon, LimitOptions, ModelOptions
from prefixcache.server.peer_arenas import ArenaRequests
from prefixcache.server.peer_socket import PeerSocket, peer_socket_path
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.server.rpc_server import RpcServer
from prefixcache.storage.layout import KVLayout
from prefixcache.types import CacheUse
from tests.client.twins import once_it_is_back, open_client
from tests.support.bearer import hash_of
from tests.support.daemon import running_daemon
from tests.support.gate import Gate, held
from tests.support.peers import peer_socket
from tests.support.program import serving
from tests.support.waiting import until

LAYOUT = KVLayout(1, 2, 64, 16, "float32")
NUM_TOKENS = 96
CALL_BYTES = NUM_TOKENS * 4 * 64 * (4 + 2 + 2 + 4)
"""Of q, k, v and out: above the least."""
RULES = {
    "identities": [
        {"token_sha256": hash_of("token"), "tenant": "with-token"},
        {"uid": os.geteuid(), "tenant": "this-user"},
    ]
}
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


class Served:
    """A daemon with its peer socket, which may be stopped and started again."""

    def __init__(self, folder: Path, *, is_guarded: bool = False, **limits: int) -> None:
        self.path = folder / "sock"
        self.target = f"unix:{self.path}"
        self._is_guarded, self._limits = is_guarded, LimitOptions(**limits)
        self.start()

    def start(self) -> None:
        self.daemon = Daemon(CacheOptions(256), ModelOptions(LAYOUT), self._limits)
        tickets = PeerTickets()
        access = OpenAccess()
        if self._is_guarded:
            access = AccessControl(parse_auth_rules(RULES), tickets)
        self.server = RpcServer(self.daemon, max_workers=8, access=access)
        self.peers = PeerSocket()
        self.peers.answer(PeerMessage.TICKET, tickets.give)
        ArenaRequests(self.daemon.arenas, access).serve(self.peers)
        self.peers.listen(peer_socket_path(self.path))
        self.peers.start()
        self.server.listen(self.target)
        self.tcp_target = self.server.listen("127.0.0.1:0")
        self.server.start()

    def close(self) -> None:
        self.server.stop(5.0)
        self.close_peers()
        self.daemon.close()

    def close_peers(self) -> None:
        self.peers.close()
        peer_socket_path(self.path).unlink(missing_ok=True)

    @property
    def num_arenas(self) -> int:
        return len(self.daemon.arenas)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as running:
        yield lambda **options: running.enter_context(closing(Served(tmp_path, **options)))


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each Prefill and Decode of the daemon, whether its output went by reference."""
    calls: list[bool] = []
    for name in ("prefill", "decode"):
        attend = getattr(engine, name)

        def counted(*arguments: Any, attend: Any = attend, **out: torch.Tensor) -> torch.Tensor:
            calls.append("out" in out)
            result: torch.Tensor = attend(*arguments, **out)
            return result

        monkeypatch.setattr(engine, name, counted)
    return calls


def tensors(num_tokens: int = NUM_TOKENS, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num_tokens, heads, 64, generator=generator) for heads in (4, 2, 2))


def new_sequence(client: Any, num_tokens: int = NUM_TOKENS) -> Any:
    return client.sequence(range(5, 5 + num_tokens), cache_use=CacheUse.NONE)


def prefilled(client: Any, seed: int = 0, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    with new_sequence(client, num_tokens) as sequence:
        out: torch.Tensor = sequence.prefill(0, *tensors(num_tokens, seed))
        return out


def give_up(gate: Gate, call: Callable[..., object]) -> None:
    """Call until a call has come to the gate, where it stays; each is given up."""
    while not gate.has_call:
        with pytest.raises((DeadlineExceededError, SequenceBusyError)):
            call(timeout_s=0.2)


# ---- the same results


@KINDS
@pytest.mark.parametrize("as_kind", ["torch", "numpy", "strided"])
def test_results_are_the_same_and_the_callers_own(
    serve: Serve, by_reference: list[bool], kind: str, as_kind: str
) -> None:
    target = serve().target
    q, k, v = tensors()
    if as_kind == "numpy":
        q, k, v = (tensor.numpy() for tensor in (q, k, v))
    if as_kind == "strided":
        q, k, v = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (q, k, v))
    outputs = []
    for options in ({}, {"arena_bytes": 0}):
        with (
            open_client(kind, target, **options) as client,
            new_sequence(client) as one,
            new_sequence(client) as other,
        ):
            outputs.append(one.prefill(0, q, k, v))
            outputs.append(client.prefill(0, [other], [NUM_TOKENS], q, k, v))
            one.append([1] * NUM_TOKENS)
            outputs.append(one.decode(0, q, k, v))
            other.append([1] * NUM_TOKENS)
            outputs.append(client.decode(0, [other], q, k, v, num_tokens=[NUM_TOKENS]))
    assert by_reference == [True] * 4 + [False] * 4
    for one, other in zip(outputs[:4], outputs[4:], strict=True):
        assert type(one) is type(q)
        assert one.dtype == q.dtype
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert not np.array_equal(np.asarray(outputs[0]), np.asarray(outputs[2]))
    outputs[0] += 1


@KINDS
def test_small_calls_go_in_the_message(serve: Serve, by_reference: list[bool], kind: str) -> None:
    served = serve()
    with open_client(kind, served.target) as client:
        prefilled(client, num_tokens=1)
        assert served.num_arenas == 0
        prefilled(client)
        prefilled(client, num_tokens=1)
        assert served.num_arenas == 1
    assert by_reference == [False, True, False]
    until(lambda: served.num_arenas == 0)


def test_bfloat16_goes_by_reference(tmp_path: Path, by_reference: list[bool]) -> None:
    model = ModelOptions(KVLayout(1, 2, 64, 16, "bfloat16"))
    q, k, v = (tensor.bfloat16() for tensor in tensors(2 * NUM_TOKENS))
    with running_daemon(CacheOptions(64), model) as running, peer_socket(running):
        outputs = []
        for arena_bytes in (2**24, 0):
            with (
                open_client("sync", running.target, arena_bytes=arena_bytes) as client,
                new_sequence(client, 2 * NUM_TOKENS) as sequence,
            ):
                outputs.append(sequence.prefill(0, q, k, v))
    assert by_reference == [True, False]
    assert torch.equal(*outputs)


@KINDS
@pytest.mark.parametrize("is_guarded", [False, True])
def test_with_and_without_access_control(
    serve: Serve, by_reference: list[bool], kind: str, is_guarded: bool
) -> None:
    served = serve(is_guarded=is_guarded)
    for credentials in (Credentials(), Credentials("token")):
        with open_client(kind, served.target, credentials=credentials) as client:
            prefilled(client)
    assert by_reference == [True, True]


# ---- what finds no room, or no arena, goes in the message


@KINDS
@pytest.mark.parametrize("how", ["arena_bytes", "limit", "peer socket", "tcp", "total"])
def test_without_an_arena_calls_go_in_the_message(
    serve: Serve, by_reference: list[bool], kind: str, how: str
) -> None:
    served = serve(**{"max_arena_bytes": 0} if how == "limit" else {})
    target, options = served.target, {}
    if how == "arena_bytes":
        options = {"arena_bytes": 0}
    elif how == "peer socket":
        served.close_peers()
    elif how == "tcp":
        target = served.tcp_target
    elif how == "total":
        served.daemon.arenas._max_total_bytes = 0
    with open_client(kind, target, **options) as client:
        prefilled(client)
        prefilled(client)
    assert by_reference == [False, False]


def test_a_refused_client_asks_again_after_a_while(
    serve: Serve, by_reference: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    clock_s = [0.0]
    with open_client("sync", served.target) as client:
        client._connection._arenas._clock = lambda: clock_s[0]
        served.daemon.arenas._max_total_bytes = 0
        prefilled(client)
        served.daemon.arenas._max_total_bytes = 2**32
        clock_s[0] = 9.9
        prefilled(client)
        clock_s[0] = 10.0
        prefilled(client)
    assert by_reference == [False, False, True]


def test_a_client_that_got_no_answer_asks_again_soon(
    serve: Serve, by_reference: list[bool]
) -> None:
    served = serve()
    clock_s = [0.0]
    with open_client("sync", served.target) as client:
        client._connection._arenas._clock = lambda: clock_s[0]
        path = peer_socket_path(served.path)
        path.rename(path.with_suffix(".away"))
        prefilled(client)
        path.with_suffix(".away").rename(path)
        clock_s[0] = 0.9
        prefilled(client)
        clock_s[0] = 1.0
        prefilled(client)
    assert by_reference == [False, False, True]


@KINDS
def test_a_call_that_finds_no_room_goes_in_the_message(
    serve: Serve, by_reference: list[bool], kind: str
) -> None:
    served = serve()
    with open_client(kind, served.target, arena_bytes=CALL_BYTES - 1) as client:
        prefilled(client)
    with open_client(kind, served.target, arena_bytes=CALL_BYTES) as client:
        prefilled(client)
    assert by_reference == [False, True]


def test_an_arena_is_no_larger_than_the_daemon_takes(
    serve: Serve, by_reference: list[bool]
) -> None:
    served = serve(max_arena_bytes=2 * CALL_BYTES)
    with open_client("sync", served.target) as client:
        prefilled(client)
        assert client.stats().arena_bytes == 2 * CALL_BYTES
    assert by_reference == [True]


# ---- failures


@KINDS
def test_after_a_failed_call_the_next_one_has_another_arena(
    serve: Serve, by_reference: list[bool], kind: str
) -> None:
    served = serve()
    with open_client(kind, served.target) as client:
        wanted = prefilled(client)
        first = set(served.daemon.arenas._by_id)
        q, k, v = tensors()
        with new_sequence(client) as sequence:
            with pytest.raises(InvalidArgumentError):
                sequence.prefill(0, q, k[:, :1], v)
            assert torch.equal(sequence.prefill(0, q, k, v), wanted)
        assert by_reference == [True, True]
        until(lambda: served.num_arenas == 1)
        assert not first & set(served.daemon.arenas._by_id)


@KINDS
def test_a_call_that_is_given_up_writes_into_no_region_of_another(
    serve: Serve, by_reference: list[bool], kind: str
) -> None:
    served = serve()
    with open_client(kind, served.target) as client:
        wanted = prefilled(client, seed=1)
        q, k, v = tensors()
        late = new_sequence(client)
        with held(engine, "prefill") as gate:
            give_up(gate, partial(late.prefill, 0, q, k, v))
            assert client._connection._arenas._arena._is_given_up
            gate.release()
            for _ in range(3):
                assert torch.equal(prefilled(client, seed=1), wanted)
        assert torch.equal(late.prefill(0, q, k, v), prefilled(client))
    until(lambda: (served.num_arenas, served.daemon.arenas.num_bytes) == (0, 0))


def test_a_cancelled_task_gives_the_arena_up(serve: Serve, by_reference: list[bool]) -> None:
    served = serve()

    async def main() -> None:
        async with AsyncClient(served.target) as client, client.sequence([1] * NUM_TOKENS) as mine:
            with held(engine, "prefill") as gate:
                task = asyncio.create_task(mine.prefill(0, *tensors()))
                await asyncio.to_thread(gate.wait)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                arena = client._connection._arenas._arena
                assert arena is not None
                assert not arena.is_good

    asyncio.run(main())


@KINDS
def test_a_call_that_grpc_repeats_is_sent_in_the_message(
    serve: Serve, by_reference: list[bool], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    with open_client(kind, served.target) as client:
        wanted = prefilled(client)
        attend, failures = engine.prefill, [UnavailableError("for a test")]

        def fails_at_first(*arguments: Any, **out: torch.Tensor) -> torch.Tensor:
            if failures:
                raise failures.pop()
            result: torch.Tensor = attend(*arguments, **out)
            return result

        monkeypatch.setattr(engine, "prefill", fails_at_first)
        assert torch.equal(prefilled(client), wanted)
        assert not failures
    assert by_reference == [True, False]


@KINDS
def test_after_a_restart_of_the_daemon_another_arena_is_registered(
    serve: Serve, by_reference: list[bool], kind: str
) -> None:
    served = serve(is_guarded=True)
    with open_client(kind, served.target) as client:
        wanted = prefilled(client)
        with new_sequence(client) as lost:
            served.close()
            served.start()
            with pytest.raises(SessionLostError):
                once_it_is_back(lambda: lost.prefill(0, *tensors()))
        assert torch.equal(prefilled(client), wanted)
        assert served.num_arenas == 1
    assert by_reference == [True, True]


def test_a_daemon_that_has_lost_the_arena_gets_the_tensors(
    serve: Serve, by_reference: list[bool]
) -> None:
    served = serve()
    with open_client("sync", served.target) as client:
        wanted = prefilled(client)
        arenas, lost = served.daemon.arenas, set(served.daemon.arenas._by_id)

        class WithoutThose(dict[int, Any]):
            def get(self, arena_id: int, default: Any = None) -> Any:
                return default if arena_id in lost else super().get(arena_id, default)

        arenas._by_id = WithoutThose(arenas._by_id)
        assert torch.equal(prefilled(client), wanted)
        assert torch.equal(prefilled(client), wanted)
        until(lambda: served.num_arenas == 1)
    assert by_reference == [True, False, True]


# ---- threads, forks


def test_many_threads_share_an_arena(serve: Serve, by_reference: list[bool]) -> None:
    served = serve()
    wanted = {}
    with open_client("sync", served.target, arena_bytes=0) as client:
        for seed in range(6):
            wanted[seed] = prefilled(client, seed)
    by_reference.clear()
    failures: list[BaseException] = []
    with open_client("sync", served.target, arena_bytes=4 * CALL_BYTES) as client:

        def work(seed: int) -> None:
            try:
                for _ in range(15):
                    assert torch.equal(prefilled(client, seed), wanted[seed])
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert served.num_arenas == 1
        assert client._connection._arenas._arena._free == [(0, 4 * CALL_BYTES)]
    assert by_reference.count(True) > 15


def test_a_forked_child_has_no_part_in_it(serve: Serve) -> None:
    # In a process without the threads of a server.
    program = """
import os, sys
import pytest, torch
from prefixcache.errors import ForkedClientError
from tests.client.test_arena import open_client, prefilled

with open_client("sync", sys.argv[1]) as client:
    out = prefilled(client)
    wanted = out.clone()
    pid = os.fork()
    if pid == 0:
        try:
            assert torch.equal(out, wanted)
            with pytest.raises(ForkedClientError):
                prefilled(client)
            client._connection._arenas.close()
            client.close()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert client._connection._arenas.ready
    assert torch.equal(prefilled(client), wanted)
    print("the parent goes on")
"""
    served = serve()
    done = subprocess.run(
        [sys.executable, "-c", program, served.target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "the parent goes on\n", done.stderr


# ---- tensors that lie there


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies between tensors of the caller and other memory."""
    made: list[str] = []
    for name in ("to_bytes", "copy_to", "copy_from"):
        copy = getattr(HostView, name)

        def counted(*arguments: Any, name: str = name, copy: Callable[..., Any] = copy) -> Any:
            made.append(name)
            return copy(*arguments)

        monkeypatch.setattr(HostView, name, counted)
    return made


def in_arena(client: Any, tensor: torch.Tensor) -> torch.Tensor:
    placed: torch.Tensor = client.empty(tensor.shape, tensor.dtype)
    return placed.copy_(tensor)


def out_of(num_tokens: int = NUM_TOKENS) -> tuple[int, int, int]:
    return num_tokens, 4, 64


@KINDS
@pytest.mark.parametrize("of", ["torch", "numpy"])
def test_what_lies_in_the_arena_is_not_copied(
    serve: Serve, by_reference: list[bool], copies: list[str], kind: str, of: str
) -> None:
    with open_client(kind, serve().target, arena_bytes=CALL_BYTES) as client:
        wanted = prefilled(client)
        dtype: object = torch.float32 if of == "torch" else np.float32
        q, k, v, out = placed = [
            client.empty((NUM_TOKENS, heads, 64), dtype) for heads in (4, 2, 2, 4)
        ]
        for tensor, source in zip(placed[:3], tensors(), strict=True):
            tensor[...] = source if of == "torch" else source.numpy()
        copies.clear()
        with new_sequence(client) as one, new_sequence(client) as other:
            assert one.prefill(0, q, k, v, out=out) is out
            assert np.array_equal(np.asarray(out), wanted)
            out[...] = 0
            assert client.prefill(0, [other], [NUM_TOKENS], q, k, v, out=out) is out
            assert np.array_equal(np.asarray(out), wanted)
            one.append([1] * NUM_TOKENS)
            other.append([1] * NUM_TOKENS)
            found = one.decode(0, q, k, v, out=out).copy() if of == "numpy" else None
            decoded = client.decode(0, [other], q, k, v, num_tokens=[NUM_TOKENS], out=out)
            assert decoded is out
            assert found is None or np.array_equal(found, out)
        assert copies == []
    assert by_reference[-4:] == [True] * (3 + (of == "numpy")) or of == "torch"
    assert all(by_reference)


@pytest.mark.parametrize("options", [{}, {"arena_bytes": 0}, {"arena_bytes": CALL_BYTES}])
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_the_result_goes_where_the_caller_wants_it(
    serve: Serve, options: dict[str, int], num_tokens: int
) -> None:
    with open_client("sync", serve().target, **options) as client:
        wanted = prefilled(client, num_tokens=num_tokens)
        wide = torch.zeros(*out_of(num_tokens)[:2], 128)
        for out in (torch.zeros(out_of(num_tokens)), wide[..., ::2], wide[..., :64]):
            with new_sequence(client, num_tokens) as sequence:
                assert sequence.prefill(0, *tensors(num_tokens), out=out) is out
            assert torch.equal(out, wanted)


@KINDS
def test_an_output_that_does_not_fit_is_refused_and_changes_nothing(
    serve: Serve, kind: str
) -> None:
    read_only = np.zeros(out_of(), np.float32)
    read_only.flags.writeable = False
    with open_client(kind, serve().target) as client, new_sequence(client) as sequence:
        q, k, v = tensors()
        for out, field in (
            (torch.zeros(NUM_TOKENS, 4, 32), "out.shape"),
            (torch.zeros(NUM_TOKENS + 1, 4, 64), "out.shape"),
            (torch.zeros(out_of(), dtype=torch.float16), "out.data_type"),
            (torch.zeros(out_of(), dtype=torch.float64), "out.data_type"),
            (torch.zeros(out_of(), device="meta"), "out"),
            (read_only, "out"),
            (np.zeros(out_of(), ">f4"), "out"),
            ([0.0], "out"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                sequence.prefill(0, q, k, v, out=out)
            assert caught.value.field == field
        sequence.prefill(0, q, k, v, out=torch.zeros(out_of()))


def test_memory_comes_back_with_the_last_view(serve: Serve) -> None:
    with open_client("sync", serve().target, arena_bytes=4 * CALL_BYTES) as client:
        tensor = client.empty((CALL_BYTES,), np.float16)
        arena = client._connection._arenas.ready
        assert arena.offset_of(tensor) == 0
        view = torch.from_numpy(tensor)[5:]
        del tensor
        assert arena._free == [(2 * CALL_BYTES, 4 * CALL_BYTES)]
        view[:] = 1
        other = client.empty((CALL_BYTES,), torch.bfloat16)
        assert other.data_ptr() % ALIGNMENT == 0
        del view
        assert arena.offset_of(client.empty((1,), np.float32)) == 0
        del other
        gc.collect()
        assert arena.region(4 * CALL_BYTES) is not None


def test_without_room_or_an_arena_it_is_memory_like_other(serve: Serve) -> None:
    served = serve()
    for target, options in (
        (served.target, {"arena_bytes": 0}),
        (served.tcp_target, {}),
        (served.target, {"arena_bytes": 64}),
    ):
        with open_client("sync", target, **options) as client:
            wanted = prefilled(client)
            q, k, v = (in_arena(client, tensor) for tensor in tensors())
            out = client.empty(out_of(), torch.float32)
            with new_sequence(client) as sequence:
                assert torch.equal(sequence.prefill(0, q, k, v, out=out), wanted)


def test_what_is_no_shape_or_type_is_refused(serve: Serve) -> None:
    with open_client("sync", serve().target) as client:
        assert client.empty((0, 4), torch.bfloat16).shape == (0, 4)
        assert client.empty((2, 0), "float16").dtype == np.float16
        for shape, dtype, field in (
            ((2, -1), np.float32, "shape"),
            ((2,), np.float64, "dtype"),
            ((2,), torch.int64, "dtype"),
            ((2,), "no type", "dtype"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                client.empty(shape, dtype)
            assert caught.value.field == field


def once_it_is_idle(sequence: Any) -> torch.Tensor:
    """The output of a Prefill that was given up before, and may be running still."""
    outputs: list[torch.Tensor] = []

    def has_output() -> bool:
        with suppress(SequenceBusyError):
            outputs.append(sequence.prefill(0, *tensors()))
        return bool(outputs)

    until(has_output)
    return outputs[0]


@KINDS
def test_a_call_that_failed_shares_its_tensors_no_more(serve: Serve, kind: str) -> None:
    served = serve()
    with open_client(kind, served.target) as client:
        wanted = prefilled(client)
        q, k, v = (in_arena(client, tensor) for tensor in tensors())
        out, other = (client.empty(out_of(), torch.float32) for _ in range(2))
        out.fill_(7)
        late = new_sequence(client)
        with held(engine, "prefill") as gate:
            give_up(gate, partial(late.prefill, 0, q, k, v, out=out))
            assert all(map(torch.equal, (q, k, v), tensors()))
            q.fill_(3)  # The daemon is still to read it.
            assert torch.equal(out, torch.full(out_of(), 7.0))
            gate.release()
            # A repeat writes no K/V: it attends over those of the first.
            assert torch.equal(once_it_is_idle(late), wanted)
        assert torch.equal(out, torch.full(out_of(), 7.0))
        q.copy_(tensors()[0])
        with new_sequence(client) as sequence:
            assert torch.equal(sequence.prefill(0, q, k, v, out=other), wanted)
        until(lambda: served.num_arenas == 1)


def test_what_a_call_that_failed_had_is_computed_with_as_it_was(serve: Serve) -> None:
    served = serve()
    with open_client("sync", served.target) as client:
        wanted = prefilled(client)
        q, k, v = (in_arena(client, tensor) for tensor in tensors())
        late = new_sequence(client)
        with held(engine, "write_kv") as gate:
            give_up(gate, partial(late.prefill, 0, q, k, v))
            for tensor in (q, k, v):
                tensor.fill_(3)
        assert torch.equal(once_it_is_idle(late), wanted)


def test_memory_outlives_the_client_and_the_daemons_mapping_does_not(serve: Serve) -> None:
    served = serve()
    with open_client("sync", served.target) as client:
        tensor = client.empty((1000,), np.float32)
        assert served.num_arenas == 1
    until(lambda: served.num_arenas == 0)
    tensor[:] = 3
    assert tensor.sum() == 3000


# ---- a daemon in a process of its own

STORAGE = (
    *("--storage", "cpu", "--num-layers", "1", "--num-kv-heads", "2", "--head-dim", "64"),
    *("--dtype", "float32", "--num-blocks", "64"),
)
WITHOUT_PAUSE = """
import sys
import numpy as np
from prefixcache import CacheUse, Client

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((96, heads, 64), np.float32) for heads in (4, 2, 2))
with Client(sys.argv[1]) as client:
    while True:
        with client.sequence(range(96), cache_use=CacheUse.NONE) as sequence:
            sequence.prefill(0, q, k, v)
        print("one more", flush=True)
"""


def test_clients_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/prefixcache.sock"
    with serving(tmp_path, *STORAGE), open_client("sync", target) as client:
        wanted = prefilled(client)
        for _ in range(5):
            command = [sys.executable, "-c", WITHOUT_PAUSE, target]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"one more\n"
                assert client.stats().arenas == 2
                process.kill()
            until(lambda: client.stats().arenas == 1)
            assert torch.equal(prefilled(client), wanted)
        until(lambda: client.stats().referenced == 0)
        stats = client.stats()
        assert stats.evictable + stats.blank == stats.num_blocks
        assert stats.arena_bytes == client_arena.DEFAULT_ARENA_BYTES


# ---- regions


class _Connection:
    is_open = True

    def close(self) -> None:
        self.is_open = False


def new_arena(num_bytes: int) -> tuple[Arena, _Connection]:
    connection = _Connection()
    return Arena(7, (ctypes.c_uint8 * num_bytes)(), connection), connection


ROOM = 16 * mmap.PAGESIZE


def test_regions_do_not_overlap_and_come_back() -> None:
    rng = random.Random(0)
    arena, _ = new_arena(ROOM)
    held_places: list[tuple[Any, int, int]] = []
    num_refused = 0
    for _ in range(2000):
        if held_places and rng.random() < 0.5:
            place = held_places.pop(rng.randrange(len(held_places)))[0]
            if isinstance(place, Region):
                place.__exit__(None, None, None)
            del place
            continue
        num_bytes = rng.randint(1, 3 * mmap.PAGESIZE)
        if rng.random() < 0.3:
            lent = arena.lend(num_bytes)
            offset = None if lent is None else arena.offset_of(lent)
            if offset is not None:
                assert (offset % mmap.PAGESIZE, len(lent)) == (0, num_bytes)
                assert all(offset + num_bytes <= o or o + n <= offset for _, o, n in held_places)
                held_places.append((lent, offset, num_bytes))
            del lent
            continue
        region = arena.region(num_bytes)
        if region is None:
            num_refused += 1
            longest = max((end - start for start, end in arena._free), default=0)
            assert num_bytes > longest
            continue
        offset, memory = region.take(num_bytes)
        assert (offset % ALIGNMENT, len(memory)) == (0, num_bytes)
        assert all(offset + num_bytes <= o or o + n <= offset for _, o, n in held_places)
        held_places.append((region, offset, num_bytes))
    assert num_refused > 10
    while held_places:
        place = held_places.pop()[0]
        if isinstance(place, Region):
            place.__exit__(None, None, None)
        del place
    assert arena.region(ROOM) is not None
    assert arena._free == []


def test_memory_can_be_given_back_in_the_middle_of_another_call() -> None:
    arena, _ = new_arena(2 * mmap.PAGESIZE)
    lent = arena.lend(1)
    assert arena.lend(2 * mmap.PAGESIZE) is None
    with arena._lock:  # The garbage collector runs in a thread that holds it.
        del lent
        gc.collect()
    assert arena.lend(2 * mmap.PAGESIZE) is not None


def test_an_arena_that_is_given_up_ends_with_its_last_region() -> None:
    arena, connection = new_arena(1024)
    one, other = arena.region(100), arena.region(100)
    assert one is not None
    assert other is not None
    with pytest.raises(ZeroDivisionError), one:
        raise ZeroDivisionError
    assert not arena.is_good
    assert arena.region(1) is None
    assert connection.is_open
    with other:
        pass
    assert not connection.is_open


def test_what_a_region_needs_is_what_its_tensors_take() -> None:
    arena, _ = new_arena(1024)
    region = arena.region(sum(map(client_arena.aligned, (1, 64, 65))))
    assert region is not None
    assert [region.take(num_bytes)[0] for num_bytes in (1, 64, 65)] == [0, 64, 128]
    assert arena._free == [(256, 1024)]
