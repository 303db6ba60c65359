"""A refused or failing call of any RPC leaves no trace.

A random history, then every way in which each RPC can be refused in the state that it led to:
statistics (but for the counters of refusals), the order of eviction, the index, every sequence
and the bytes of the K/V memory are the same before and after.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache import engine
from prefixcache.core.sequence import Sequence
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization
from prefixcache.types import AttentionOptions
from tests.support.daemon import running_daemon
from tests.support.gate import held
from tests.support.invariants import check_invariants, snapshot
from tests.support.stubs import (
    METHODS,
    Peer,
    Refused,
    Row,
    StreamCall,
    Stubs,
    connected,
    refusals,
)

NUM_BLOCKS, BLOCK_SIZE = 12, 4
LAYOUT = KVLayout(2, 1, 4, BLOCK_SIZE, "float32")
OTHER_LAYOUTS = [
    replace(LAYOUT, quantization=Quantization("int8")),
    LatentLayout(2, 3, 2, BLOCK_SIZE, "float32"),
]
LAYERS = range(LAYOUT.num_layers)
STEP_FIELDS = {"Free": "free", "Commit": "commit", "Append": "append", "Allocate": "allocates"}
PROMPTS = [list(range(start, start + 24)) for start in (0, 0, 100)]
PROMPTS[1][10:] = range(50, 64)

Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["allocate", "allocate", "compute", "compute", "append", "fork", "truncate", "free"]
        ),
        st.integers(0, 5),
        st.integers(0, 23),
        st.integers(0, 11),
    ),
    min_size=3,
    max_size=14,
)


@dataclass(frozen=True)
class Refusal:
    """A call that must be refused: by a status with `reason`, or by the codes of its rows."""

    name: str
    request: Any
    reason: str = ""
    codes: tuple[int, ...] = ()
    counter: str = ""
    """The one counter that it may raise."""


class World:
    """A daemon, two owners, and what a history did to it."""

    def __init__(self, daemon: Daemon, stubs: Stubs, stream: StreamCall) -> None:
        self.daemon = daemon
        self.stubs = stubs
        self.stream = stream
        self.layout = LAYOUT if daemon.engine is None else daemon.engine.memory.layout
        self.peers = [Peer(stubs, bytes([number]) * 16) for number in (1, 2)]
        self.stranger = Peer(stubs, os.urandom(16))

    def live(self) -> list[Sequence]:
        with self.daemon.sequences.lock:
            return list(self.daemon.sequences.live.all_holders())

    def peer_of(self, sequence: Sequence) -> Peer:
        return next(peer for peer in self.peers if peer.owner == sequence.owner)

    def state(self) -> dict[str, Any]:
        """Everything that a refused call must leave alone, in the RPCs' and the core's words."""
        reply = self.stubs.stats()
        stats = {
            field.name: getattr(reply, field.name)
            for field in admin_pb2.GetStatsResponse.DESCRIPTOR.fields
            if field.name not in ("uptime_s", "calls", "allocation_refused", "append_refused")
        }
        return {"stats": stats, "core": snapshot(self.daemon.sequences), "memory": self.memory()}

    def memory(self) -> bytes:
        if self.daemon.engine is None:
            return b""
        memory = self.daemon.engine.memory
        return b"".join(memory.block_span(i).numpy().tobytes() for i in range(NUM_BLOCKS))

    def refusal_counters(self) -> dict[str, int]:
        stats = self.stubs.stats()
        return {name: getattr(stats, name) for name in ("allocation_refused", "append_refused")}

    def attention(self, peer: Peer, name: str, layer: int, rows: list[tuple[int, int, int]]) -> Any:
        """A call with K/V that differ from every other call's."""
        num_tokens, layout = sum(row[2] for row in rows), self.layout

        def tensor(dim: int) -> attention_pb2.Tensor:
            shape = (num_tokens, layout.num_kv_heads, dim)
            data = np.random.default_rng().standard_normal(shape, dtype=np.float32)
            return attention_pb2.Tensor(
                data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=shape, data=data.tobytes()
            )

        request = METHODS[name].request(
            batch=peer.batch(layer, rows, AttentionOptions(scale=0.5)),
            q=tensor(layout.head_dim),
            k=tensor(layout.head_dim),
        )
        if layout.kind != "latent":
            request.v.CopyFrom(tensor(layout.value_dim))
        return request

    # ---- history

    def fill(self, prompt: list[int]) -> None:
        """Leave the blocks of a prompt cached and free."""
        peer = self.peers[0]
        sequence_id = peer.allocate(prompt).sequence_id
        if self.daemon.engine is None:
            peer.commit(sequence_id, 0, len(prompt))
        else:
            for layer in LAYERS:
                rows = [(sequence_id, 0, len(prompt))]
                self.stubs.call("Prefill", self.attention(peer, "Prefill", layer, rows))
        peer.free(sequence_id)

    def apply(self, step: Step) -> None:
        """One step that is valid in this state, or finds no room."""
        kind, which, amount, extra = step
        peer, live = self.peers[which % 2], self.live()
        try:
            if kind == "allocate":
                peer.allocate(
                    PROMPTS[which % 3][: amount + 1],
                    request_id=f"request {extra}" if extra < 3 else "",
                    num_lookahead_tokens=extra % 4,
                    cache_use=extra % 5,
                )
            elif live:
                self.change(kind, live[which % len(live)], amount, extra)
        except Refused as refusal:
            assert refusal.reason in ("NO_ROOM", "REQUEST_ID_CONFLICT"), refusal

    def change(self, kind: str, sequence: Sequence, amount: int, extra: int) -> None:
        peer, sequence_id = self.peer_of(sequence), sequence.sequence_id
        n, computed = sequence.num_tokens, sequence.num_computed
        if kind == "compute":
            self.compute(sequence, amount)
        elif kind == "append":
            peer.append(sequence_id, n, range(amount % 7), num_lookahead_tokens=extra % 4)
        elif kind == "fork" and computed >= n:
            peer.fork(sequence_id, n, [""] * (1 + extra % 2))
        elif kind == "truncate":
            peer.truncate(sequence_id, n, max(1, n - amount % 6))
        elif kind == "free" and extra < 5:
            peer.free(sequence_id)

    def compute(self, sequence: Sequence, amount: int) -> None:
        """Complete K/V of some more tokens, in all layers or in some of them."""
        peer, sequence_id = self.peer_of(sequence), sequence.sequence_id
        if self.daemon.engine is None:
            computed = sequence.num_computed
            peer.commit(sequence_id, computed, min(amount, sequence.num_tokens - computed))
            return
        limit = sequence.num_tokens + sequence.num_lookahead_tokens
        for layer in LAYERS[: 1 + amount % 3]:
            start = sequence.computed[layer]
            count = min(amount, limit - start)
            if count > 0:
                name = "Prefill" if amount % 2 else "Decode"
                self.stubs.call(
                    name, self.attention(peer, name, layer, [(sequence_id, start, count)])
                )

    # ---- refusals

    def refusals(self) -> Iterator[Refusal]:
        yield from self.refusals_without_a_sequence()
        live = self.live()
        for sequence in {id(found): found for found in live[:1] + live[-1:]}.values():
            yield from self.refusals_on(sequence)
            if self.daemon.engine is not None:
                yield from self.attention_refusals_on(sequence)

    def refusals_without_a_sequence(self) -> Iterator[Refusal]:
        peer, pool = self.peers[0], self.daemon.sequences.pool
        for name in METHODS:
            yield Refusal(name, b"\x08", "INVALID_ARGUMENT")
        yield Refusal(
            "GetServerInfo",
            cache_pb2.GetServerInfoRequest(expected_fingerprint=bytes(32)),
            "FINGERPRINT_MISMATCH",
        )
        bad_keys = cache_pb2.ExtraKeys(lora=cache_pb2.Lora(path="path"))
        for name, request in (
            ("Lookup", cache_pb2.LookupRequest(token_ids=PROMPTS[0])),
            ("Allocate", cache_pb2.AllocateRequest(owner=peer.owner, token_ids=PROMPTS[0])),
        ):
            yield Refusal(name, changed(request, extra_keys=bad_keys), "INVALID_ARGUMENT")
            yield Refusal(name, changed(request, token_ids=[]), "INVALID_ARGUMENT")
            yield Refusal(name, changed(request, full_hit=3), "INVALID_ARGUMENT")
        too_many = changed(request, token_ids=range(NUM_BLOCKS * BLOCK_SIZE + 1))
        yield Refusal("Allocate", too_many, "EXCEEDS_POOL", counter="allocation_refused")
        if pool.num_free < NUM_BLOCKS:
            fresh = changed(request, token_ids=range(1000, 1001 + pool.num_free * BLOCK_SIZE))
            yield Refusal("Allocate", fresh, "NO_ROOM", counter="allocation_refused")
            # A hit does not make room: its own blocks leave the free queue.
            extended = PROMPTS[0][:8] + list(range(1000, 1001 + pool.num_free * BLOCK_SIZE))
            found = self.stubs.lookup(extended)
            fits_the_pool = len(extended) <= NUM_BLOCKS * BLOCK_SIZE
            if found.num_blocks_free < found.num_blocks_needed and fits_the_pool:
                long = changed(request, token_ids=extended)
                yield Refusal("Allocate", long, "NO_ROOM", counter="allocation_refused")
            yield Refusal("ResetCache", admin_pb2.ResetCacheRequest(), "BLOCKS_IN_USE")
        other = changed(request, layout_fingerprint=bytes(32))
        yield Refusal("Allocate", other, "FINGERPRINT_MISMATCH")
        yield Refusal(
            "ListSequences", admin_pb2.ListSequencesRequest(page_size=1001), "INVALID_ARGUMENT"
        )

    def refusals_on(self, sequence: Sequence) -> Iterator[Refusal]:
        peer, sequence_id, n = self.peer_of(sequence), sequence.sequence_id, sequence.num_tokens
        if sequence.request_id:
            request = cache_pb2.AllocateRequest(
                owner=peer.owner, request_id=sequence.request_id, token_ids=[1, 2, 3]
            )
            yield Refusal("Allocate", request, "REQUEST_ID_CONFLICT")
        yield from self.append_refusals(peer, sequence)
        if self.daemon.engine is None:
            yield from self.commit_refusals(peer, sequence)

        fork = cache_pb2.ForkRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens=n, request_ids=[""]
        )
        yield Refusal("Fork", changed(fork, owner=self.stranger.owner), "SEQUENCE_NOT_FOUND")
        yield Refusal("Fork", changed(fork, num_tokens=n + 1), "WRONG_POSITION")
        yield Refusal("Fork", changed(fork, request_ids=["a", "a"]), "INVALID_ARGUMENT")
        if sequence.num_computed < n:
            yield Refusal("Fork", fork, "NOT_COMPUTED")
        if sequence.request_id:
            again = changed(fork, request_ids=["new", sequence.request_id])
            yield Refusal("Fork", again, "REQUEST_ID_CONFLICT")

        cut = cache_pb2.TruncateRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens_before=n, num_tokens_after=1
        )
        yield Refusal("Truncate", changed(cut, owner=self.stranger.owner), "SEQUENCE_NOT_FOUND")
        yield Refusal("Truncate", changed(cut, num_tokens_before=n + 1), "WRONG_POSITION")
        yield Refusal("Truncate", changed(cut, num_tokens_after=0), "INVALID_ARGUMENT")
        yield Refusal("Truncate", changed(cut, num_tokens_after=n + 1), "INVALID_ARGUMENT")

        free = cache_pb2.FreeRequest(owner=self.stranger.owner, sequence_ids=[sequence_id])
        yield Refusal("Free", free, codes=(cache_pb2.RESULT_CODE_NOT_FOUND,))
        yield Refusal("Free", changed(free, owner=b""), "INVALID_ARGUMENT")
        names = [sequence.request_id or "unknown"]
        unknown = (cache_pb2.RESULT_CODE_NOT_FOUND,)
        yield Refusal("Free", changed(free, request_ids=names), codes=unknown * 2)
        mine = cache_pb2.FreeRequest(owner=peer.owner, sequence_ids=[sequence_id])
        yield Refusal("Free", changed(mine, request_ids=["a", ""]), "INVALID_ARGUMENT")

    def append_refusals(self, peer: Peer, sequence: Sequence) -> Iterator[Refusal]:
        pool, n = self.daemon.sequences.pool, sequence.num_tokens
        row = Row(sequence.sequence_id, n + 1, (7, 8))
        wrong = peer.append_request([row, Row(sequence.sequence_id ^ 1, 1, (9,))])
        yield Refusal(
            "Append",
            wrong,
            codes=(cache_pb2.RESULT_CODE_WRONG_POSITION, cache_pb2.RESULT_CODE_NOT_FOUND),
        )
        yield Refusal("Append", peer.append_request([row, row]), "INVALID_ARGUMENT")
        right = peer.append_request([replace(row, start=n)])
        yield Refusal("Append", changed(right, token_ids=[7]), "INVALID_ARGUMENT")
        salted = changed(right)
        salted.extra_keys.add(row=0, extra_keys=cache_pb2.ExtraKeys(cache_salt="s"))
        yield Refusal("Append", salted, "INVALID_ARGUMENT")
        yield Refusal(
            "Append",
            changed(right, owner=self.stranger.owner),
            codes=(cache_pb2.RESULT_CODE_NOT_FOUND,),
        )
        yield Refusal(
            "Append",
            changed(right, num_lookahead_tokens=[NUM_BLOCKS * BLOCK_SIZE]),
            codes=(cache_pb2.RESULT_CODE_EXCEEDS_POOL,),
            counter="append_refused",
        )
        others = pool.num_referenced - len(sequence.block_table) - len(sequence.copy_holds)
        if others > 0:
            # At least n, so that 2 tokens more are too many even if it is just that.
            room = (NUM_BLOCKS - others) * BLOCK_SIZE
            yield Refusal(
                "Append",
                changed(right, num_lookahead_tokens=[max(0, room - n - 2 + 1)]),
                codes=(cache_pb2.RESULT_CODE_NO_ROOM,),
                counter="append_refused",
            )

    def commit_refusals(self, peer: Peer, sequence: Sequence) -> Iterator[Refusal]:
        computed, left = sequence.num_computed, sequence.num_tokens - sequence.num_computed
        request = cache_pb2.CommitRequest(
            owner=peer.owner,
            sequence_ids=[sequence.sequence_id],
            start_positions=[computed],
            num_computed_tokens=[left + 1],
        )
        beyond, wrong, unknown = (
            cache_pb2.RESULT_CODE_BEYOND_TOKENS,
            cache_pb2.RESULT_CODE_WRONG_POSITION,
            cache_pb2.RESULT_CODE_NOT_FOUND,
        )
        yield Refusal("Commit", request, codes=(beyond,))
        yield Refusal("Commit", changed(request, start_positions=[computed + 1]), codes=(wrong,))
        yield Refusal("Commit", changed(request, owner=self.stranger.owner), codes=(unknown,))
        yield Refusal("Commit", changed(request, start_positions=[]), "INVALID_ARGUMENT")
        for name in ("Prefill", "Decode"):
            row = (sequence.sequence_id, 0, 1)
            yield Refusal(name, self.attention(peer, name, 0, [row]), "NO_STORAGE")

    def attention_refusals_on(self, sequence: Sequence) -> Iterator[Refusal]:
        peer, sequence_id, n = self.peer_of(sequence), sequence.sequence_id, sequence.num_tokens
        yield Refusal(
            "Commit",
            cache_pb2.CommitRequest(
                owner=peer.owner,
                sequence_ids=[sequence_id],
                start_positions=[sequence.num_computed],
                num_computed_tokens=[0],
            ),
            "STORAGE_OWNED",
        )
        for name in ("Prefill", "Decode"):
            for layer in LAYERS:
                computed = sequence.computed[layer]
                limit = n + sequence.num_lookahead_tokens

                def call(rows: list[Any], name: str = name, layer: int = layer) -> Any:
                    return self.attention(peer, name, layer, rows)

                skips = (sequence_id, computed + 1, 1)
                yield Refusal(name, call([skips]), "WRONG_POSITION")
                if computed:
                    again = (sequence_id, computed - 1, 2)
                    yield Refusal(name, call([again]), "WRONG_POSITION")
                beyond = (sequence_id, computed, limit - computed + 1)
                yield Refusal(name, call([beyond]), "BEYOND_TOKENS")
                if computed < limit:
                    right = (sequence_id, computed, limit - computed)
                    yield from self.spoiled_refusals(name, layer, right, sequence)

    def spoiled_refusals(
        self, name: str, layer: int, right: tuple[int, int, int], sequence: Sequence
    ) -> Iterator[Refusal]:
        """The row could be served: the whole call fails for something else in it."""
        peer = self.peer_of(sequence)
        unknown = (sequence.sequence_id ^ 1, 0, 1)
        both = self.attention(peer, name, layer, [right, unknown])
        yield Refusal(name, both, "SEQUENCE_NOT_FOUND")
        for other in self.live():
            if other.owner == sequence.owner and other is not sequence:
                skips = (other.sequence_id, other.computed[layer] + 1, 1)
                yield Refusal(
                    name, self.attention(peer, name, layer, [right, skips]), "WRONG_POSITION"
                )
        stolen = self.attention(self.stranger, name, layer, [right])
        yield Refusal(name, stolen, "SEQUENCE_NOT_FOUND")
        twice = self.attention(peer, name, layer, [right, right])
        yield Refusal(name, twice, "INVALID_ARGUMENT")
        for operand in ("q", "k", "v"):
            other_type, other_shape = (self.attention(peer, name, layer, [right]) for _ in range(2))
            getattr(other_type, operand).data_type = attention_pb2.DATA_TYPE_FLOAT16
            getattr(other_shape, operand).shape[:] = [1, 2, 2]
            yield Refusal(name, other_type, "INVALID_ARGUMENT")
            yield Refusal(name, other_shape, "INVALID_ARGUMENT")
        for change in self.bad_weights():
            spoiled = self.attention(peer, name, layer, [right])
            change(spoiled)
            yield Refusal(name, spoiled, "INVALID_ARGUMENT")

    def bad_weights(self) -> Iterator[Callable[[Any], None]]:
        """Options that no call may have, and a v where none belongs or none where one does."""
        for field, value in (("scale", math.nan), ("window", 0), ("soft_cap", -1.0)):
            yield lambda request, field=field, value=value: setattr(request.batch, field, value)
        too_many = [1.0] * (self.layout.num_kv_heads + 1)
        for field in ("alibi_slopes", "sinks"):
            yield lambda request, field=field: getattr(request.batch, field).extend(too_many)
        if self.layout.kind == "latent":
            yield lambda request: request.v.CopyFrom(request.k)
            yield lambda request: request.batch.ClearField("scale")
        else:
            yield lambda request: request.ClearField("v")

    def busy_refusals(self, sequence: Sequence, layer: int | None) -> Iterator[Refusal]:
        """While an attention call of `layer`, or (None) a copy, runs on the sequence."""
        peer, sequence_id, n = self.peer_of(sequence), sequence.sequence_id, sequence.num_tokens
        append = peer.append_request([Row(sequence_id, n, (1,))])
        yield Refusal("Append", append, codes=(cache_pb2.RESULT_CODE_BUSY,))
        fork = cache_pb2.ForkRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens=n, request_ids=[""]
        )
        yield Refusal("Fork", fork, "SEQUENCE_BUSY")
        cut = cache_pb2.TruncateRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens_before=n, num_tokens_after=n
        )
        yield Refusal("Truncate", cut, "SEQUENCE_BUSY")
        for name in ("Prefill", "Decode"):
            for number in LAYERS if layer is None else [layer]:
                row = (sequence_id, sequence.computed[number], 1)
                yield Refusal(name, self.attention(peer, name, number, [row]), "SEQUENCE_BUSY")
        yield Refusal("ResetCache", admin_pb2.ResetCacheRequest(), "BLOCKS_IN_USE")

    def check(self, refusals: Iterator[Refusal]) -> None:
        before, counters = self.state(), self.refusal_counters()
        for refusal in refusals:
            try:
                reply = self.stubs.call(refusal.name, refusal.request)
            except Refused as refused:
                assert refused.reason == refusal.reason, (refusal, refused)
            else:
                assert tuple(reply.result_codes) == refusal.codes != (), (refusal, reply)
            in_a_step = refusal.name in STEP_FIELDS and not isinstance(refusal.request, bytes)
            if in_a_step:
                self.check_in_a_step(refusal)
            assert self.state() == before, refusal
            if refusal.counter:
                counters[refusal.counter] += 1 + in_a_step
            assert self.refusal_counters() == counters, refusal
        with self.daemon.sequences.lock:
            check_invariants(self.daemon.sequences)

    def check_in_a_step(self, refusal: Refusal) -> None:
        field = STEP_FIELDS[refusal.name]
        is_list = field == "allocates"
        parts = {field: [refusal.request] if is_list else refusal.request}
        reply = self.stream.run(cache_pb2.StepRequest(**parts))
        if refusal.codes:
            assert not reply.errors
            assert tuple(getattr(reply, field).result_codes) == refusal.codes, (refusal, reply)
        else:
            ((place, refused),) = refusals(reply).items()
            assert place == (field, 0)
            assert refused.reason == refusal.reason, (refusal, refused)


def changed(request: Any, **fields: Any) -> Any:
    """A copy of a request with some fields set anew."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name, value in fields.items():
        copy.ClearField(name)
        copy.MergeFrom(type(request)(**{name: value}))
    return copy


def after(steps: list[Step], model: ModelOptions | None, check: Callable[[World], None]) -> None:
    cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, hash_seed="a seed of the refusal tests")
    with (
        running_daemon(cache, model) as running,
        connected(running.target) as stubs,
        stubs.steps() as stream,
    ):
        world = World(running.daemon, stubs, stream)
        # A hit that a refused call made young would change places with the younger prompt.
        world.fill(PROMPTS[0][:9])
        world.fill(PROMPTS[2][:5])
        for step in steps:
            world.apply(step)
        check(world)


FEW = settings(derandomize=True, database=None, deadline=None, max_examples=40)


@FEW
@given(STEPS)
def test_refused_calls_change_nothing_without_storage(steps: list[Step]) -> None:
    after(steps, None, lambda world: world.check(world.refusals()))


@FEW
@given(STEPS)
def test_refused_calls_change_nothing_with_storage(steps: list[Step]) -> None:
    after(steps, ModelOptions(LAYOUT), lambda world: world.check(world.refusals()))


@pytest.mark.parametrize("layout", OTHER_LAYOUTS, ids=str)
@settings(FEW, max_examples=10)
@given(steps=STEPS)
def test_refused_calls_change_nothing_in_other_kinds_of_storage(
    layout: Layout, steps: list[Step]
) -> None:
    after(steps, ModelOptions(layout), lambda world: world.check(world.refusals()))


@FEW
@given(STEPS)
def test_refused_calls_change_nothing_while_a_call_runs(steps: list[Step]) -> None:
    after(steps, ModelOptions(LAYOUT), check_while_attention_runs)


def check_while_attention_runs(world: World) -> None:
    if not world.daemon.sequences.pool.num_free:
        return
    peer = world.peers[0]
    sequence_id = peer.allocate([77, 78], num_lookahead_tokens=2).sequence_id
    sequence = next(s for s in world.live() if s.sequence_id == sequence_id)
    for layer, name in zip(LAYERS, ("prefill", "decode"), strict=True):
        with held(engine, name) as gate:
            method = name.capitalize()
            request = world.attention(peer, method, layer, [(sequence_id, 0, 2)])
            running = world.stubs.start(method, request)
            gate.wait()
            world.check(world.busy_refusals(sequence, layer))
            gate.release()
            world.stubs.finish(running)
    with world.daemon.sequences.lock:
        check_invariants(world.daemon.sequences)


@FEW
@given(STEPS)
def test_refused_calls_change_nothing_while_a_copy_runs(steps: list[Step]) -> None:
    after(steps, ModelOptions(LAYOUT), check_while_a_copy_runs)


def check_while_a_copy_runs(world: World) -> None:
    """The copy itself is the one change in memory, and the gate holds it."""
    assert world.daemon.engine is not None
    parents = [
        sequence
        for sequence in world.live()
        if sequence.num_computed >= sequence.num_tokens and sequence.num_tokens % BLOCK_SIZE
    ]
    if not parents or not world.daemon.sequences.pool.num_free:
        return
    parent = parents[0]
    peer = world.peer_of(parent)
    peer.fork(parent.sequence_id, parent.num_tokens)
    with held(engine, "copy_blocks") as gate:
        request = peer.append_request([Row(parent.sequence_id, parent.num_tokens, (5,))])
        running = world.stubs.start("Append", request)
        gate.wait()
        world.check(world.busy_refusals(parent, None))
        gate.release()
        assert list(world.stubs.finish(running).num_copies) == [1]


@FEW
@given(STEPS)
def test_a_draining_daemon_refuses_new_sequences_and_changes_nothing(steps: list[Step]) -> None:
    after(steps, None, check_draining)


def check_draining(world: World) -> None:
    world.daemon.is_draining = True
    peer = world.peers[0]
    refusals = [
        Refusal("Allocate", cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[1]), "DRAINING")
    ]
    refusals += [
        Refusal(
            "Fork",
            cache_pb2.ForkRequest(
                owner=sequence.owner,
                sequence_id=sequence.sequence_id,
                num_tokens=sequence.num_tokens,
                request_ids=[""],
            ),
            "DRAINING",
        )
        for sequence in world.live()
    ]
    world.check(iter(refusals))


@pytest.mark.parametrize("num_lookahead_tokens", [0, 3])
def test_rows_that_are_refused_stay_as_they_were_and_the_rest_go_on(
    num_lookahead_tokens: int,
) -> None:
    with running_daemon(CacheOptions(4, 4)) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        first, second, third = (
            peer.allocate([start, start + 1, start + 2, start + 3]).sequence_id
            for start in (0, 10, 20)
        )
        sequences = {s.sequence_id: s for s in running.daemon.sequences.live.all_holders()}
        rows = peer.append_rows(
            [
                Row(first, 3, (1,)),
                Row(second, 4, (1, 2, 3, 4, 5)),
                Row(third, 4, (1,), 0, num_lookahead_tokens),
            ]
        )
        assert [row.code for row in rows] == [
            cache_pb2.RESULT_CODE_WRONG_POSITION,
            cache_pb2.RESULT_CODE_NO_ROOM,
            cache_pb2.RESULT_CODE_OK,
        ]
        assert [len(row.new_block_ids) for row in rows] == [0, 0, 1]
        assert [sequences[i].num_tokens for i in (first, second, third)] == [4, 4, 5]
        assert [len(sequences[i].block_table) for i in (first, second, third)] == [1, 1, 2]
