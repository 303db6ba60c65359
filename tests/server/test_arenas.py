"""Tensors by reference: which memory the daemon takes, and what it computes with it."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from prefixcache import engine
from prefixcache.client import channel_options
from prefixcache.client.peer_connection import PeerRefusedError
from prefixcache.config.network import LimitSection
from prefixcache.errors import InvalidArgumentError, UnavailableError
from prefixcache.rpc._pb import attention_pb2
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions, LimitOptions, ModelOptions
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.storage.shared_memory import SEALS, create_shared_memory, open_for_reading
from tests.server.test_attention_rpc import BLOCK_SIZE, FIXED_SCALES, KINDS, NUM_BLOCKS
from tests.support.bearer import bearing, hash_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.held_calls import LAYOUT
from tests.support.held_calls import Served as Held
from tests.support.invariants import check_invariants, snapshot
from tests.support.peers import OwnArena, connection_to, peer_socket
from tests.support.stubs import Peer, Stubs, connected
from tests.support.toy_model import Run, ToyModel, attention_request, from_wire
from tests.support.waiting import until

SIZE = 4 * mmap.PAGESIZE
LIMITS = LimitOptions(
    max_arena_bytes=2 * SIZE, max_total_arena_bytes=3 * SIZE, max_user_arena_bytes=3 * SIZE
)
CACHE = CacheOptions(NUM_BLOCKS, BLOCK_SIZE)


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CACHE, ModelOptions(LAYOUT), LIMITS) as running, peer_socket(running):
        yield running


# ---- which memory


@contextmanager
def file_of(kind: str) -> Iterator[int]:
    """A descriptor that is no fit memory, or not to be had."""
    with ExitStack() as opened:
        if kind == "a file":
            yield opened.enter_context(tempfile.TemporaryFile()).fileno()
            return
        if kind == "a pipe":
            ends = os.pipe()
            opened.callback(os.close, ends[0])
            opened.callback(os.close, ends[1])
            yield ends[1]
            return
        if kind == "for reading":
            fd = create_shared_memory("test", SIZE)
            opened.callback(os.close, fd)
            reader = open_for_reading(fd)
            opened.callback(os.close, reader)
            yield reader
            return
        huge = os.MFD_HUGETLB if kind == "huge pages" else 0
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | huge)
        opened.callback(os.close, fd)
        os.ftruncate(fd, 2**21 if huge else 0 if kind == "empty" else SIZE)
        seals = {
            "without seals": 0,
            "sealed against growing": fcntl.F_SEAL_GROW,
            "sealed against writing": SEALS | fcntl.F_SEAL_WRITE,
            "sealed against new writers": SEALS | 0x10,
        }.get(kind, SEALS)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("a file", "no shared memory|not sealed"),  # a file of tmpfs has seals, but not this one
        ("a pipe", "no shared memory"),
        ("for reading", "reading and writing"),
        ("without seals", "not sealed against shrinking"),
        ("sealed against growing", "not sealed against shrinking"),
        ("sealed against writing", "sealed against writing"),
        ("sealed against new writers", "sealed against writing"),
        ("huge pages", "huge pages"),
        ("empty", "has 0 bytes"),
    ],
)
def test_memory_that_is_not_fit_is_refused(running: RunningDaemon, kind: str, problem: str) -> None:
    with file_of(kind) as fd, connection_to(running) as connection:
        with pytest.raises(PeerRefusedError, match=problem):
            connection.ask(PeerMessage.ARENA, b"", [fd])
        assert len(running.daemon.arenas) == 0


def test_one_arena_and_all_of_them_are_limited(running: RunningDaemon) -> None:
    arenas = running.daemon.arenas
    with pytest.raises(PeerRefusedError, match=f"must have 1 to {2 * SIZE}"):
        OwnArena(running, 2 * SIZE + 1)
    with closing(OwnArena(running, 2 * SIZE)) as first, closing(OwnArena(running, SIZE)):
        assert (len(arenas), arenas.num_bytes) == (2, 3 * SIZE)
        with pytest.raises(PeerRefusedError, match="0 are left"):
            OwnArena(running, 1)
        first.close()
        until(lambda: arenas.num_bytes == SIZE)
        OwnArena(running, 2 * SIZE).close()
    until(lambda: (len(arenas), arenas.num_bytes) == (0, 0))


@pytest.mark.parametrize("num_descriptors", [0, 2])
def test_an_arena_is_one_descriptor(running: RunningDaemon, num_descriptors: int) -> None:
    fd = create_shared_memory("test", SIZE)
    with connection_to(running) as connection, pytest.raises(PeerRefusedError, match="one desc"):
        connection.ask(PeerMessage.ARENA, b"", [fd] * num_descriptors)
    os.close(fd)


def test_a_connection_has_one_arena(running: RunningDaemon) -> None:
    fd = create_shared_memory("test", SIZE)
    with connection_to(running) as connection:
        assert len(connection.ask(PeerMessage.ARENA, b"", [fd]).rest) == 8
        with pytest.raises(PeerRefusedError, match="has an arena"):
            connection.ask(PeerMessage.ARENA, b"", [fd])
    os.close(fd)
    until(lambda: len(running.daemon.arenas) == 0)


def test_an_arena_cannot_be_made_smaller_once_it_is_taken(running: RunningDaemon) -> None:
    fd = create_shared_memory("test", SIZE)
    with connection_to(running) as connection:
        connection.ask(PeerMessage.ARENA, b"", [fd])
        for num_bytes in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, num_bytes)
    os.close(fd)


@pytest.mark.parametrize(
    ("model", "limits"),
    [
        (None, LimitOptions()),
        (ModelOptions(LAYOUT), LimitOptions(max_arena_bytes=0)),
        (ModelOptions(LAYOUT), LimitOptions(max_total_arena_bytes=0)),
    ],
)
def test_a_daemon_without_storage_or_that_may_take_none_has_no_arenas(
    model: ModelOptions | None, limits: LimitOptions
) -> None:
    with (
        running_daemon(CACHE, model, limits) as running,
        connected(running.target) as stubs,
        peer_socket(running) as peers,
    ):
        info = stubs.info()
        assert "arenas" not in info.capabilities
        assert info.limits.max_arena_bytes == 0
        assert not peers.has_handlers


def test_a_daemon_says_that_it_takes_arenas(running: RunningDaemon) -> None:
    with connected(running.target) as stubs:
        assert "arenas" in stubs.info().capabilities
        assert stubs.info().limits.max_arena_bytes == 2 * SIZE
        with closing(OwnArena(running, SIZE)):
            stats = stubs.call("GetStats", b"")
            assert (stats.arenas, stats.arena_bytes) == (1, SIZE)


# ---- calls


@dataclass
class Served:
    running: RunningDaemon
    stubs: Stubs
    model: ToyModel
    arena: OwnArena

    def run(self, tokens: range, **fields: int) -> Run:
        return Run(Peer(self.stubs), self.model, list(tokens)).allocate(**fields)


def serve(kind: str) -> Iterator[Served]:
    layout, num_query_heads = KINDS[kind]
    wants_scales = layout.quantization is not None and layout.quantization.scales == "tensor"
    scales = FIXED_SCALES if wants_scales else None
    with (
        running_daemon(CACHE, ModelOptions(layout, scales=scales)) as running,
        peer_socket(running),
        connected(running.target) as stubs,
        closing(OwnArena(running, 2**16)) as arena,
    ):
        yield Served(running, stubs, ToyModel(layout, num_query_heads, scales=scales), arena)


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    yield from serve(request.param)


@pytest.fixture
def plain() -> Iterator[Served]:
    """float32: elements of 4 bytes."""
    yield from serve("float32-gqa")


ALL = ("q", "k", "v", "out")


def moved(request: Any, arena: OwnArena, fields: tuple[str, ...] = ALL, first: int = 64) -> Any:
    """The request with these tensors in the arena, one after the other, `first` bytes apart."""
    by_reference = type(request)()
    by_reference.CopyFrom(request)
    offset = first
    for field in fields:
        if field == "out":
            num_bytes = len(request.q.data) // request.q.shape[2] * value_dim_of(request)
            span = by_reference.out
        elif request.HasField(field):
            tensor = getattr(by_reference, field)
            num_bytes = len(tensor.data)
            arena.memory[offset : offset + num_bytes] = np.frombuffer(tensor.data, np.uint8)
            tensor.ClearField("data")
            span = tensor.arena
        else:
            continue
        span.arena_id, span.offset, span.num_bytes = arena.arena_id, offset, num_bytes
        offset += -(-num_bytes // 64) * 64
    assert offset <= len(arena.memory)
    return by_reference


def value_dim_of(request: Any) -> int:
    if request.HasField("v"):
        return int(request.v.shape[2])
    layout, _ = KINDS["latent"]
    return layout.value_dim


def output_of(reply: Any, arena: OwnArena) -> torch.Tensor:
    if not reply.out.HasField("arena"):
        return from_wire(reply.out)
    span = reply.out.arena
    assert (span.arena_id, reply.out.data) == (arena.arena_id, b"")
    data = arena.memory[span.offset : span.offset + span.num_bytes].tobytes()
    return from_wire(
        attention_pb2.Tensor(data_type=reply.out.data_type, shape=reply.out.shape, data=data)
    )


@pytest.mark.parametrize("fields", [ALL, ("q", "k", "v"), ("out",), ("k",), ("v", "out")])
@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_a_call_by_reference_does_bit_for_bit_what_it_does_in_the_message(
    served: Served, name: str, fields: tuple[str, ...]
) -> None:
    one, other = served.run(range(11)), served.run(range(11))
    memory = served.running.daemon.engine.memory
    for layer in range(served.model.layout.num_layers):
        for count in (7, 4):
            sent = attention_request(name, layer, [(one, count)])
            wanted = from_wire(served.stubs.call(name, sent).out)
            placed = moved(attention_request(name, layer, [(other, count)]), served.arena, fields)
            reply = served.stubs.call(name, placed)
            assert reply.out.HasField("arena") == ("out" in fields)
            assert torch.equal(output_of(reply, served.arena), wanted)
            for run in (one, other):
                run.positions[layer] += count
    for mine, theirs in zip(one.block_ids[:2], other.block_ids[:2], strict=True):
        assert torch.equal(memory.spans[mine], memory.spans[theirs])


@pytest.mark.gpu
def test_a_pool_on_a_gpu_takes_tensors_by_reference() -> None:
    model = ToyModel(LAYOUT, 4)
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT, device="cuda")) as running,
        peer_socket(running),
        connected(running.target) as stubs,
        closing(OwnArena(running, 2**16)) as arena,
    ):
        runs = [Run(Peer(stubs), model, list(range(11))).allocate() for _ in range(2)]
        sent, placed = (attention_request("Prefill", 0, [(run, 11)]) for run in runs)
        wanted = from_wire(stubs.call("Prefill", sent).out)
        assert torch.equal(output_of(stubs.call("Prefill", moved(placed, arena)), arena), wanted)


def test_a_repeat_of_a_call_by_reference_is_answered_again(plain: Served) -> None:
    run = plain.run(range(5))
    request = moved(attention_request("Prefill", 0, [(run, 5)]), plain.arena)
    first = output_of(plain.stubs.call("Prefill", request), plain.arena)
    plain.arena.memory[request.out.offset :][: request.out.num_bytes] = 0
    assert torch.equal(output_of(plain.stubs.call("Prefill", request), plain.arena), first)


def test_a_call_may_use_several_arenas(plain: Served) -> None:
    run, other = plain.run(range(5)), plain.run(range(5))
    wanted = from_wire(
        plain.stubs.call("Prefill", attention_request("Prefill", 0, [(other, 5)])).out
    )
    with closing(OwnArena(plain.running, 2**14)) as second:
        request = moved(attention_request("Prefill", 0, [(run, 5)]), plain.arena, ("q", "out"))
        request = moved(request, second, ("k", "v"))
        assert torch.equal(output_of(plain.stubs.call("Prefill", request), plain.arena), wanted)


Change = Callable[[Any, int], None]


def _set(field: str, name: str, value: int) -> Change:
    def change(request: Any, arena_bytes: int) -> None:
        tensor = getattr(request, field)
        setattr(tensor if field == "out" else tensor.arena, name, value % 2**64)

    return change


def _at_the_end(field: str, past: int) -> Change:
    """The last place where it fits, and so many bytes more."""

    def change(request: Any, arena_bytes: int) -> None:
        tensor = getattr(request, field)
        span = tensor if field == "out" else tensor.arena
        span.offset = arena_bytes - span.num_bytes + past

    return change


def _both(request: Any, arena_bytes: int) -> None:
    request.q.data = bytes(request.q.arena.num_bytes)


def _onto(field: str, shift: int) -> Change:
    def change(request: Any, arena_bytes: int) -> None:
        request.out.offset = getattr(request, field).arena.offset + shift

    return change


def _shorter(request: Any, arena_bytes: int) -> None:
    request.out.num_bytes -= 4


def _shape(request: Any, arena_bytes: int) -> None:
    del request.k.shape[:]
    request.k.shape.extend([2**32 - 1] * 3)
    request.k.arena.num_bytes = 2**64 - 1


BAD: dict[str, tuple[Change, str]] = {
    **{
        f"{field} {name}": (_set(field, "offset", value), f"{path}.offset")
        for field, path in (("q", "q.arena"), ("k", "k.arena"), ("v", "v.arena"), ("out", "out"))
        for name, value in (
            ("at 2**64 - 1", -1),
            ("at the last place of 64 bits", -4),
            ("between elements", 66),
        )
    },
    **{
        f"{field} beyond the end": (_at_the_end(field, 4), f"{path}.offset")
        for field, path in (("q", "q.arena"), ("k", "k.arena"), ("v", "v.arena"), ("out", "out"))
    },
    "q with another length": (_set("q", "num_bytes", 4), "q.arena.num_bytes"),
    "k with a length of 64 bits": (_set("k", "num_bytes", -1), "k.arena.num_bytes"),
    "v with none": (_set("v", "num_bytes", 0), "v.arena.num_bytes"),
    "a shape whose bytes are beyond 64 bits": (_shape, "k.arena.num_bytes"),
    "out with another length": (_shorter, "out.num_bytes"),
    "out with a length of 64 bits": (_set("out", "num_bytes", -1), "out.offset"),
    "q twice": (_both, "q.data"),
    "out where q is": (_onto("q", 0), "out.offset"),
    "out across the start of k": (_onto("k", -4), "out.offset"),
    "out across the end of v": (_onto("v", 16), "out.offset"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_place_is_refused_by_name_and_changes_nothing(plain: Served, bad: str) -> None:
    change, field = BAD[bad]
    run = plain.run(range(5))
    request = moved(attention_request("Prefill", 0, [(run, 5)]), plain.arena)
    change(request, len(plain.arena.memory))
    daemon = plain.running.daemon
    before = (snapshot(daemon.sequences), daemon.engine.memory.spans.clone())
    memory = plain.arena.memory.copy()
    refused = plain.stubs.refused("Prefill", request)
    assert (refused.code.name, refused.field) == ("INVALID_ARGUMENT", field)
    assert snapshot(daemon.sequences) == before[0]
    assert torch.equal(daemon.engine.memory.spans, before[1])
    assert np.array_equal(plain.arena.memory, memory)
    run.compute()


@pytest.mark.parametrize("field", ["q", "k", "v", "out"])
def test_the_last_place_of_an_arena_can_be_used(plain: Served, field: str) -> None:
    run, other = plain.run(range(5)), plain.run(range(5))
    sent = attention_request("Prefill", 0, [(other, 5)])
    wanted = from_wire(plain.stubs.call("Prefill", sent).out)
    request = moved(attention_request("Prefill", 0, [(run, 5)]), plain.arena)
    start = (request.out if field == "out" else getattr(request, field).arena).offset
    _at_the_end(field, 0)(request, len(plain.arena.memory))
    if field != "out":
        span = getattr(request, field).arena
        moved_bytes = plain.arena.memory[start : start + span.num_bytes]
        plain.arena.memory[span.offset :] = moved_bytes
    assert torch.equal(output_of(plain.stubs.call("Prefill", request), plain.arena), wanted)


def test_an_arena_that_is_gone_or_was_never_there_is_refused(plain: Served) -> None:
    run = plain.run(range(5))
    gone = OwnArena(plain.running, 2**14)
    request = moved(attention_request("Prefill", 0, [(run, 5)]), gone)
    gone.close()
    until(lambda: len(plain.running.daemon.arenas) == 1)
    assert plain.stubs.refused("Prefill", request).reason == "ARENA_LOST"
    for field in ALL:
        request = moved(attention_request("Prefill", 0, [(run, 5)]), plain.arena)
        span = request.out if field == "out" else getattr(request, field).arena
        for arena_id in (0, 2**64 - 1, span.arena_id ^ 1):
            span.arena_id = arena_id
            refused = plain.stubs.refused("Prefill", request)
            assert (refused.code.name, refused.reason) == ("FAILED_PRECONDITION", "ARENA_LOST")
    run.compute()


def test_a_call_that_grpc_repeats_is_not_computed_by_reference(
    plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may be at work in a region that its caller gives to another call."""
    run = plain.run(range(5))
    request = attention_request("Prefill", 0, [(run, 5)])
    attend = engine.prefill
    num_calls = 0

    def fails_at_first(*arguments: Any, **out: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise UnavailableError("for a test")
        result: torch.Tensor = attend(*arguments, **out)
        return result

    monkeypatch.setattr(engine, "prefill", fails_at_first)
    with grpc.insecure_channel(plain.running.target, channel_options()) as channel:
        stubs = Stubs(channel)
        refused = stubs.refused("Prefill", moved(request, plain.arena))
        assert (refused.reason, num_calls) == ("ARENA_LOST", 1)
        num_calls = 0
        assert stubs.call("Prefill", request).out.data
        assert num_calls == 2


def test_what_a_client_changes_during_a_call_spoils_nobody_elses(plain: Served) -> None:
    victim = plain.run(range(50, 61))
    victim.compute()
    request = moved(
        attention_request("Prefill", 0, [(plain.run(range(40)), 40)]), plain.arena, first=0
    )
    end = request.out.offset + request.out.num_bytes
    is_over = threading.Event()

    def scribble() -> None:
        generator = np.random.default_rng(0)
        while not is_over.is_set():
            plain.arena.memory[:end] = generator.integers(0, 256, end, np.uint8)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(50):
            # The first writes K/V, the others are repeats.
            reply = plain.stubs.call("Prefill", request)
            assert reply.out.shape == request.q.shape
    finally:
        is_over.set()
        thread.join()
    check_invariants(plain.running.daemon.sequences)
    victim.append([7, 8])
    victim.compute(2, "Decode")
    with closing(OwnArena(plain.running, SIZE)):
        plain.run(range(50, 62)).compute()


def test_a_call_that_runs_keeps_its_arena_mapped() -> None:
    with (
        running_daemon(CacheOptions(16, 4), ModelOptions(LAYOUT)) as running,
        peer_socket(running),
        connected(running.target) as stubs,
    ):
        held = Held(running, stubs)
        arenas = running.daemon.arenas
        run, other = held.run(range(7)), held.run(range(7))
        other.compute_layer(0)
        arena = OwnArena(running, 2**14)
        request = moved(attention_request("Prefill", 0, [(run, 7)]), arena)
        memory = arena.memory
        with held.running_request("Prefill", request) as (gate, future):
            arena.close()
            until(lambda: len(arenas) == 0)
            assert arenas.num_bytes == 2**14
            gate.release()
            reply = stubs.finish(future)
        span = reply.out.arena
        data = memory[span.offset : span.offset + span.num_bytes].tobytes()
        wanted = stubs.call("Prefill", _again(other))
        assert data == wanted.out.data
        until(lambda: arenas.num_bytes == 0)


def _again(run: Run) -> Any:
    """A repeat of its last call at layer 0."""
    run.positions[0] = 0
    return attention_request("Prefill", 0, [(run, 7)])


# ---- whose


TOKENS = {"a": ["client"], "b": ["client"], "ops": ["admin"]}
RULES = {
    "identities": [
        {"token_sha256": hash_of(name), "tenant": name, "roles": roles}
        for name, roles in TOKENS.items()
    ]
}


@pytest.fixture
def guarded() -> Iterator[RunningDaemon]:
    access = AccessControl(parse_auth_rules(RULES), PeerTickets())
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT), access=access) as running,
        peer_socket(running, access),
    ):
        yield running


@pytest.mark.parametrize("token", ["", "unknown", "ops", "Bearer a", "\udcff"])
def test_under_access_control_a_stranger_gets_no_arena(guarded: RunningDaemon, token: str) -> None:
    fd = create_shared_memory("test", SIZE)
    with connection_to(guarded) as connection, pytest.raises(PeerRefusedError):
        connection.ask(PeerMessage.ARENA, token.encode(errors="surrogateescape"), [fd])
    os.close(fd)
    assert len(guarded.daemon.arenas) == 0


def test_another_tenants_calls_cannot_use_an_arena(guarded: RunningDaemon) -> None:
    model = ToyModel(LAYOUT, 4)
    with (
        closing(OwnArena(guarded, 2**14, "a")) as arena,
        bearing(guarded.target, "a") as a,
        bearing(guarded.target, "b") as b,
    ):
        runs = [Run(Peer(stubs), model, list(range(5))).allocate() for stubs in (a, b)]
        mine, foreign = (moved(attention_request("Prefill", 0, [(run, 5)]), arena) for run in runs)
        assert b.refused("Prefill", foreign).reason == "ARENA_LOST"
        moved(attention_request("Prefill", 0, [(runs[0], 5)]), arena)
        a.call("Prefill", mine)


def test_the_reply_to_a_stranger_says_no_secret(guarded: RunningDaemon) -> None:
    fd = create_shared_memory("test", SIZE)
    with connection_to(guarded) as connection:
        with pytest.raises(PeerRefusedError) as refused:
            connection.ask(PeerMessage.ARENA, b"my-secret", [fd])
        assert "my-secret" not in str(refused.value)
    with suppress(OSError):
        os.close(fd)


# ---- how much of it


def test_a_user_leaves_memory_to_others_where_there_are_no_tenants() -> None:
    limits = LimitOptions(
        max_arena_bytes=2 * SIZE, max_total_arena_bytes=4 * SIZE, max_user_arena_bytes=3 * SIZE
    )
    uid = os.getuid()
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT), limits) as running,
        peer_socket(running),
        closing(OwnArena(running, 2 * SIZE)),
        closing(OwnArena(running, SIZE)),
    ):
        with pytest.raises(PeerRefusedError, match="0 are left to its user"):
            OwnArena(running, 1)
        fd = create_shared_memory("test", SIZE)
        arena_id = running.daemon.arenas.add(fd, "", uid + 1, ())
        with pytest.raises(InvalidArgumentError, match="0 are left to its user"):
            running.daemon.arenas.add(fd, "", uid + 1, ())
        running.daemon.arenas.remove(arena_id)
        os.close(fd)


def test_a_tenant_cannot_take_the_memory_of_another() -> None:
    access = AccessControl(parse_auth_rules(RULES), PeerTickets())
    limits = LimitOptions(
        max_arena_bytes=2 * SIZE, max_total_arena_bytes=6 * SIZE, max_user_arena_bytes=2 * SIZE
    )
    with (
        running_daemon(CACHE, ModelOptions(LAYOUT), limits, access=access) as running,
        peer_socket(running, access),
        closing(OwnArena(running, SIZE, "a")),
        closing(OwnArena(running, SIZE, "a")) as second,
    ):
        with pytest.raises(PeerRefusedError, match="0 are left to its tenant"):
            OwnArena(running, 1, "a")
        with closing(OwnArena(running, 2 * SIZE, "b")):
            assert running.daemon.arenas.num_bytes == 4 * SIZE
        second.close()
        until(lambda: running.daemon.arenas.num_bytes == SIZE)
        OwnArena(running, SIZE, "a").close()


@pytest.mark.parametrize(
    ("flags", "of_a_user"),
    [
        ({}, 3 * 2**30),
        ({"max_arena": 100, "max_arenas": 101}, 100),
        ({"max_arena": 10, "max_arenas": 101}, 76),
        ({"max_arena": 10, "max_arenas": 1}, 1),
        ({"max_arena": 0, "max_arenas": 0}, 0),
        ({"max_arenas_per_user": 5}, 5),
    ],
)
def test_a_user_has_three_quarters_or_one_arena(flags: dict[str, int], of_a_user: int) -> None:
    assert LimitSection(**flags).arena_bytes_of_a_user == of_a_user
