"""Requests that are right for the state that a daemon is in, to be sent as they are or made bad."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from prefixcache.core.sequence import Sequence
from prefixcache.core.sessions import owner_key
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2, session_pb2
from prefixcache.server.daemon import Daemon
from prefixcache.storage.layout import KVLayout
from prefixcache.storage.shared_memory import create_shared_memory, map_shared_memory
from tests.chaos.handler_calls import METHODS

OWNERS = tuple(bytes([number]) * 16 for number in (1, 2))
LAYOUT = KVLayout(2, 1, 4, 4, "float32")
"""Also of the tensors for a daemon that takes none."""
_MAX_PROMPT = 14
_ARENA_BYTES = 2**20


class ValidRequests:
    """One for each RPC by its name; RPCs that it does not know get an empty message.

    tenant: whose they are; empty for a daemon without access control.
    """

    def __init__(self, daemon: Daemon, rng: random.Random, tenant: str = "") -> None:
        self._daemon = daemon
        self._rng = rng
        self._tenant = tenant
        self._arena = _new_arena(daemon, tenant)
        self._session_ids: list[bytes] = []
        self._last_number = 0
        self._makers: dict[str, Callable[[], Message]] = {
            "GetServerInfo": self._server_info,
            "Lookup": lambda: self._with_prompt(cache_pb2.LookupRequest(want_hashes=True)),
            "Explain": self._explain,
            "Allocate": self.allocate,
            "Append": self._append,
            "Commit": self._commit,
            "Fork": self._fork,
            "Truncate": self._truncate,
            "Free": self.free,
            "Step": self._step,
            "OpenSession": self.open_session,
            "KeepAlive": lambda: session_pb2.KeepAliveRequest(session_id=self._session_id()),
            "CloseSession": self.close_session,
            "Prefill": lambda: self._attention("Prefill"),
            "Decode": lambda: self._attention("Decode"),
        }

    def make(self, name: str) -> Message:
        maker = self._makers.get(name)
        return maker() if maker is not None else METHODS[name].request()

    def session_opened(self, session_id: bytes) -> None:
        """Requests may name it from now on, until it has ended."""
        self._session_ids.append(session_id)

    def session_ids(self) -> list[bytes]:
        with self._daemon.sequences.lock:
            sessions = self._daemon.sequences.live.sessions
            self._session_ids = [
                session_id
                for session_id in self._session_ids
                if owner_key(self._tenant, session_id) in sessions
            ]
        return self._session_ids

    def live(self) -> list[Sequence]:
        """Those that requests name: of `OWNERS` and of these sessions."""
        names = self._names()
        with self._daemon.sequences.lock:
            live = self._daemon.sequences.live.by_id.values()
            return [sequence for sequence in live if sequence.owner in names]

    def end_strays(self) -> None:
        """End the sequences and sessions of which no request knows the owner."""
        names, sequences = self._names(), self._daemon.sequences
        with sequences.lock:
            for sequence in list(sequences.live.by_id.values()):
                if sequence.owner not in names:
                    sequences.live.end(sequence)
            for session in list(sequences.live.sessions):
                if session.session_id not in names:
                    sequences.live.end_session(session)

    def _names(self) -> dict[bytes, bytes]:
        """What requests call an owner, by what the core knows it by."""
        owners = (*OWNERS, *self.session_ids())
        return {owner_key(self._tenant, owner): owner for owner in owners}

    def _owner_of(self, sequences: list[Sequence]) -> bytes:
        return self._names()[sequences[0].owner] if sequences else OWNERS[0]

    def allocate(self) -> cache_pb2.AllocateRequest:
        rng = self._rng
        request = cache_pb2.AllocateRequest(
            owner=rng.choice((*OWNERS, *self.session_ids()[:2])),
            cache_use=rng.choice((0, 1, 1, 2, 3, 4)),
            resumed=rng.random() < 0.1,
        )
        if rng.random() < 0.3:
            request.request_id = f"request {rng.randrange(8)}"
        if rng.random() < 0.2:
            request.layout_fingerprint = self._daemon.info.layout_fingerprint
        if rng.random() < 0.1:
            request.wait_pending_ms = 1
        return self._ordered(self._with_prompt(request))

    def free(self) -> cache_pb2.FreeRequest:
        sequences = self._of_one_owner()
        return self._ordered(
            cache_pb2.FreeRequest(
                owner=self._owner_of(sequences),
                sequence_ids=[sequence.sequence_id for sequence in sequences] or [1],
            )
        )

    def open_session(self) -> session_pb2.OpenSessionRequest:
        return session_pb2.OpenSessionRequest(ttl_s=60.0, client_name="fuzz")

    def close_session(self) -> session_pb2.CloseSessionRequest:
        return session_pb2.CloseSessionRequest(session_id=self._session_id())

    def _server_info(self) -> Message:
        fingerprint = self._daemon.info.layout_fingerprint if self._rng.random() < 0.5 else b""
        return cache_pb2.GetServerInfoRequest(expected_fingerprint=fingerprint)

    def _with_prompt(self, request: Any) -> Any:
        self._fill_prompt(request)
        request.num_lookahead_tokens = self._rng.choice((0, 0, 3))
        return request

    def _explain(self) -> admin_pb2.ExplainRequest:
        request = self._fill_prompt(
            admin_pb2.ExplainRequest(cache_use=self._rng.choice((0, 1, 1, 2, 3, 4)))
        )
        if self._rng.random() < 0.5:
            request.tenant = self._tenant
        return request

    def _fill_prompt(self, request: Any) -> Any:
        rng = self._rng
        num_tokens = rng.randint(1, _MAX_PROMPT)
        request.token_ids.extend(range(base := rng.choice((0, 0, 50)), base + num_tokens))
        request.full_hit = rng.choice((0, 1, 2))
        if rng.random() < 0.4:
            self._fill_extra_keys(request.extra_keys, 0, num_tokens)
            if rng.random() < 0.5:
                request.extra_keys.lora.name, request.extra_keys.lora.path = "adapter", "path"
            if rng.random() < 0.5:
                request.extra_keys.cache_salt = "salt"
        return request

    def _fill_extra_keys(self, keys: Any, begin: int, end: int) -> None:
        if end > begin and self._rng.random() < 0.5:
            keys.multimodal_items.add(identifier="image", offset=begin, num_tokens=1)

    def _of_one_owner(self) -> list[Sequence]:
        """Up to three of them; none if there are none."""
        live = self.live()
        if not live:
            return []
        owner = self._rng.choice(live).owner
        mine = [sequence for sequence in live if sequence.owner == owner]
        return self._rng.sample(mine, min(len(mine), self._rng.randint(1, 3)))

    def _append(self) -> cache_pb2.AppendRequest:
        sequences = self._of_one_owner()
        counts = [self._rng.randrange(4) for _ in sequences]
        request = cache_pb2.AppendRequest(
            owner=self._owner_of(sequences),
            sequence_ids=[sequence.sequence_id for sequence in sequences],
            start_positions=[sequence.num_tokens for sequence in sequences],
            num_tokens=counts,
            token_ids=[self._rng.randrange(3) for _ in range(sum(counts))],
        )
        if self._rng.random() < 0.3:
            request.num_lookahead_tokens.extend([2] * len(sequences))
        if sequences and self._rng.random() < 0.2:
            start = sequences[0].num_tokens
            keys = request.extra_keys.add(row=0).extra_keys
            self._fill_extra_keys(keys, start, start + counts[0])
        return self._ordered(request)

    def _commit(self) -> cache_pb2.CommitRequest:
        sequences = self._of_one_owner()
        return self._ordered(
            cache_pb2.CommitRequest(
                owner=self._owner_of(sequences),
                sequence_ids=[sequence.sequence_id for sequence in sequences],
                start_positions=[sequence.num_computed for sequence in sequences],
                num_computed_tokens=[
                    max(0, sequence.num_tokens - sequence.num_computed) for sequence in sequences
                ],
            )
        )

    def _fork(self) -> cache_pb2.ForkRequest:
        """Of one whose tokens are computed, if there is one."""
        live = self.live()
        done = [sequence for sequence in live if sequence.num_computed >= sequence.num_tokens]
        parent = self._rng.choice(done or live) if live else None
        return self._ordered(
            cache_pb2.ForkRequest(
                owner=self._owner_of([parent] if parent else []),
                sequence_id=parent.sequence_id if parent else 1,
                num_tokens=parent.num_tokens if parent else 1,
                request_ids=[""] * self._rng.randint(1, 2),
            )
        )

    def _truncate(self) -> cache_pb2.TruncateRequest:
        live = self.live()
        sequence = self._rng.choice(live) if live else None
        before = sequence.num_tokens if sequence else 2
        return self._ordered(
            cache_pb2.TruncateRequest(
                owner=self._owner_of([sequence] if sequence else []),
                sequence_id=sequence.sequence_id if sequence else 1,
                num_tokens_before=before,
                num_tokens_after=self._rng.randint(1, before),
            )
        )

    def _step(self) -> cache_pb2.StepRequest:
        request = cache_pb2.StepRequest()
        if self._rng.random() < 0.5:
            request.free.CopyFrom(self.free())
        if self._daemon.engine is None and self._rng.random() < 0.5:
            request.commit.CopyFrom(self._commit())
        if self._rng.random() < 0.5:
            request.append.CopyFrom(self._append())
        for _ in range(self._rng.randrange(3)):
            request.allocates.append(self.allocate())
            request.allocates[-1].wait_pending_ms = 0
        return request

    def _attention(self, name: str) -> Message:
        rng, layout = self._rng, self._layout()
        layer = rng.randrange(layout.num_layers)
        sequences = self._of_one_owner()
        starts = [sequence.computed[layer % len(sequence.computed)] for sequence in sequences]
        limits = [s.num_tokens + s.num_lookahead_tokens for s in sequences]
        counts = [max(1, limit - start) for limit, start in zip(limits, starts, strict=True)]
        request: Any = METHODS[name].request(
            batch=attention_pb2.AttentionBatch(
                owner=self._owner_of(sequences),
                layer=layer,
                sequence_ids=[sequence.sequence_id for sequence in sequences],
                start_positions=starts,
                num_tokens=counts,
            )
        )
        if rng.random() < 0.3:
            request.batch.window, request.batch.soft_cap = 3, 30.0
        for operand, heads in (("q", 2 * layout.num_kv_heads), ("k", 1), ("v", 1)):
            shape = (sum(counts), heads, layout.head_dim)
            data = np.random.default_rng(rng.randrange(2**32)).standard_normal(shape, np.float32)
            getattr(request, operand).MergeFrom(
                attention_pb2.Tensor(
                    data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=shape, data=data.tobytes()
                )
            )
        if self._arena is not None and rng.random() < 0.5:
            self._put_in_arena(request)
        self._ordered(request.batch)
        return request

    def _put_in_arena(self, request: Any) -> None:
        """Some of its tensors, and its output."""
        arena_id, memory = self._arena
        offset = 0
        for operand in ("q", "k", "v"):
            tensor = getattr(request, operand)
            if self._rng.random() < 0.8:
                data = np.frombuffer(tensor.data, np.uint8)
                memory[offset : offset + len(data)] = data
                tensor.ClearField("data")
                tensor.arena.MergeFrom(_span(arena_id, offset, len(data)))
                offset += len(data)
        if self._rng.random() < 0.8:
            num_bytes = 4 * math.prod(request.q.shape)
            request.out.MergeFrom(_span(arena_id, offset, num_bytes))

    def _layout(self) -> Any:
        return self._daemon.engine.memory.layout if self._daemon.engine else LAYOUT

    def _session_id(self) -> bytes:
        return self._rng.choice(self.session_ids() or [bytes(24)])

    def _ordered(self, request: Any) -> Any:
        """Number some of the calls, as clients do."""
        if self._rng.random() < 0.3:
            self._last_number += 1
            request.order.number = self._last_number
            request.order.settled = self._last_number - 1
        return request


def _new_arena(daemon: Daemon, tenant: str) -> tuple[int, npt.NDArray[np.uint8]] | None:
    """One of the tenant's, by its number; None for a daemon that takes none."""
    if not daemon.arenas.max_bytes:
        return None
    fd = create_shared_memory("arena-of-a-test", _ARENA_BYTES)
    try:
        memory = map_shared_memory(fd, _ARENA_BYTES, writable=True)
        return daemon.arenas.add(fd, tenant, 0, ()), np.frombuffer(memoryview(memory), np.uint8)
    finally:
        os.close(fd)


def _span(arena_id: int, offset: int, num_bytes: int) -> attention_pb2.ArenaSpan:
    return attention_pb2.ArenaSpan(arena_id=arena_id, offset=offset, num_bytes=num_bytes)
