"""Part 4: bad calls of every RPC, in every field and in the bytes of the message.

No call may end as INTERNAL or UNKNOWN, and one that is refused, or that only reads, must leave the
daemon as it was: the block manager, the sessions and the K/V. Most calls go to the handlers
themselves, the rest through a socket to the same daemon.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from structlog.processors import format_exc_info
from structlog.testing import capture_logs

from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.callers import ADMIN, CLIENT, ROLES
from prefixcache.server.daemon import CacheOptions, LimitOptions, ModelOptions
from prefixcache.server.peer_tickets import PeerTickets
from tests.chaos.checked_daemon import broken_invariant, manager_state
from tests.chaos.handler_calls import METHODS, Handlers, Metadata, Outcome, caught_handlers
from tests.chaos.mutations import change_bytes, change_field, field_paths
from tests.chaos.report import Figures
from tests.chaos.valid_requests import LAYOUT, ValidRequests
from tests.support.bearer import hash_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import TIMEOUT_S

NUM_BLOCKS = 24
MAX_MESSAGE_BYTES = 2**20
WIRE_PART = 0.03
_READ_ONLY = ("GetServerInfo", "Lookup", "Explain", "GetStats", "ListSequences", "ListSessions")
_CHECK_EVERY = 1000
_FEW, _MANY = 3, 10
_MAX_SESSIONS = 4
_BAD_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_MAX_SHOWN = 20

_FORMS = ((ModelOptions(), False), (ModelOptions(LAYOUT), False), (ModelOptions(), True))
"""Without and with K/V in the daemon, and with access control."""
_TENANT, _STRANGER, _ADMIN = "tenant", "stranger", "operator"
_RULES = {
    "identities": [
        {"token_sha256": hash_of(name), "tenant": name, "roles": list(roles)}
        for name, roles in {_TENANT: ROLES, _STRANGER: [CLIENT], _ADMIN: [ADMIN]}.items()
    ],
    "tenants": {_TENANT: {"guaranteed_blocks": 8, "max_blocks": 20}},
}
_NEEDS_A_SEQUENCE = ("Append", "Commit", "Fork", "Truncate", "Prefill", "Decode")

Call = Callable[[str, Sequence[bytes], Metadata], Outcome]


@dataclass
class _Counts:
    """refused: mutated calls that ended with a status, or whose rows were all refused."""

    codes: Counter[str]
    fields: set[tuple[str, ...]]
    calls: int = 0
    refused: int = 0
    valid: int = 0
    valid_accepted: int = 0


def run(folder: Path, rng: random.Random, num_calls: int) -> Figures:
    """num_calls: bad ones that are refused; see `_FORMS`."""
    figures = Figures("fuzz")
    counts = _Counts(Counter(), set())
    begin_s = time.monotonic()
    for model, has_tenants in _FORMS:
        cache = CacheOptions(
            NUM_BLOCKS,
            block_size=4,
            hash_seed="a seed of the fuzzer",
            event_buffer_bytes=0 if has_tenants else 2**20,
        )
        limits = LimitOptions(max_message_bytes=MAX_MESSAGE_BYTES)
        with (
            capture_logs([format_exc_info]) as log,
            caught_handlers() as handlers,
        ):
            access = None
            if has_tenants:
                access = AccessControl(parse_auth_rules(_RULES), PeerTickets())
            with running_daemon(cache, model, limits, access=access) as running:
                tenant = _TENANT if has_tenants else ""
                fuzzer = Fuzzer(running, handlers, rng, figures, counts, tenant)
                fuzzer.run(counts.refused + num_calls // len(_FORMS))
        failures = [event["exception"] for event in log if event["log_level"] == "error"]
        figures.problems += failures[:_MAX_SHOWN]
    figures.seconds = time.monotonic() - begin_s
    _report(figures, counts)
    return figures


class Fuzzer:
    def __init__(
        self,
        running: RunningDaemon,
        handlers: Handlers,
        rng: random.Random,
        figures: Figures,
        counts: _Counts,
        tenant: str,
    ) -> None:
        self._tenant = tenant
        self._daemon = running.daemon
        self._running = running
        self._handlers = handlers
        self._rng = rng
        self._figures = figures
        self._counts = counts
        self._valid = ValidRequests(running.daemon, rng, tenant)
        self._fields = [
            (name, path)
            for name, method in METHODS.items()
            for path in field_paths(method.request.DESCRIPTOR)
        ]
        self._state = manager_state(self._daemon)

    def run(self, until_refused: int) -> None:
        targets = iter(self._fields)
        with grpc.insecure_channel(self._running.target, _UNLIMITED) as channel:
            wire = _wire_calls(channel)
            while self._counts.refused < until_refused:
                self._keep_going()
                name, path = next(targets, (None, None)) or (None, None)
                if name is None or path is None:
                    name, path = self._rng.choice(self._fields)
                call = wire if self._rng.random() < WIRE_PART else self._handlers.call
                self._bad_call(call, name, path)
                if self._counts.calls % _CHECK_EVERY == 0:
                    self._check()
            self._oversized(wire)
        self._garbage()
        self._check()

    # ---- calls

    def _bad_call(self, call: Call, name: str, path: tuple[str, ...]) -> None:
        request = self._valid.make(name)
        if self._rng.random() < 0.6:
            for _ in range(self._rng.choice((1, 1, 1, 2))):
                change_field(request, path, self._rng)
            self._counts.fields.add((name, *path))
            data = request.SerializeToString()
        else:
            data = change_bytes(request.SerializeToString(), request.DESCRIPTOR, self._rng)
        messages = [data]
        if not METHODS[name].is_stream and self._rng.random() < 0.02:
            messages = self._rng.choice(([], [data, data]))
        self._send(call, name, messages, self._any_metadata())

    def _any_metadata(self) -> Metadata:
        """Mostly what is right."""
        if not self._tenant or self._rng.random() < 0.7:
            return _bearer(self._tenant)
        return self._rng.choice(_WRONG_METADATA)

    def _send(
        self, call: Call, name: str, messages: Sequence[bytes], metadata: Metadata
    ) -> Outcome:
        outcome, data = call(name, messages, metadata), b"".join(messages)
        self._counts.calls += 1
        self._counts.codes[outcome.code.name] += 1
        changes_nothing = _was_refused(outcome) or name in _READ_ONLY
        self._counts.refused += _was_refused(outcome)
        if outcome.code in _BAD_CODES or outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._report(name, data, f"ended as {outcome.code.name}: {outcome.details}")
            self._figures.lost += outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
        is_foreign = metadata != _bearer(self._tenant)
        if is_foreign and name in _NEEDS_A_SEQUENCE and not _was_refused(outcome):
            self._figures.wrong += 1
            self._report(name, data, f"of another caller ({metadata}) was answered")
        state = self._state_now()
        if changes_nothing and state != self._state:
            self._figures.wrong += 1
            changed = [part for part in state if state[part] != self._state[part]]
            self._report(name, data, f"({outcome.code.name}) has changed {', '.join(changed)}")
        self._state = state
        return outcome

    def _keep_going(self) -> None:
        """Right calls in between: a daemon without anything in it refuses all alike."""
        live = self._valid.live()
        if len(self._daemon.sequences.live) > len(live) + _FEW:
            self._valid.end_strays()
            self._state = self._state_now()
        if len(live) < _FEW:
            self._right_call("Allocate")
        while len(self._valid.live()) > _MANY:
            self._right_call("Free")
        num_sessions = len(self._valid.session_ids())
        if num_sessions < 2:
            self._right_call("OpenSession")
        elif num_sessions > _MAX_SESSIONS:
            self._right_call("CloseSession")
        if self._rng.random() < 0.3:
            self._right_call(self._rng.choice(list(METHODS)))

    def _right_call(self, name: str) -> None:
        data = self._valid.make(name).SerializeToString()
        outcome = self._handlers.call(name, [data], _bearer(self._tenant))
        if name == "OpenSession" and outcome.replies:
            self._valid.session_opened(outcome.replies[0].session_id)
        self._counts.valid += 1
        self._counts.valid_accepted += outcome.code is grpc.StatusCode.OK
        if outcome.code in _BAD_CODES:
            self._report(name, data, f"ended as {outcome.code.name}: {outcome.details}")
        self._state = self._state_now()

    def _oversized(self, call: Call) -> None:
        """More bytes than the daemon takes, of each RPC: gRPC refuses, and the daemon goes on."""
        for name in METHODS:
            large = b"\x0a" + b"\xff" * MAX_MESSAGE_BYTES
            outcome = self._send(call, name, [large], _bearer(self._tenant))
            if outcome.code is grpc.StatusCode.OK:
                self._report(name, b"", "took a message that is larger than the limit")

    def _garbage(self) -> None:
        """Connections on which something else than gRPC is spoken."""
        path = self._running.target.removeprefix("unix:")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for number in range(40):
            with socket.socket(socket.AF_UNIX) as peer, suppress(OSError):
                peer.connect(path)
                peer.sendall((preface if number % 2 else b"") + self._rng.randbytes(200))
        self._right_call("GetStats")
        self._figures.faults["connections of garbage"] += 40

    # ---- what came of it

    def _state_now(self) -> dict[str, Any]:
        with self._daemon.sequences.lock:
            return manager_state(self._daemon)

    def _check(self) -> None:
        if problem := broken_invariant(self._daemon):
            self._figures.problems.append(problem)

    def _report(self, name: str, data: bytes, text: str) -> None:
        if len(self._figures.problems) < _MAX_SHOWN:
            self._figures.problems.append(f"{name} of {data[:200].hex()} {text}")


def _was_refused(outcome: Outcome) -> bool:
    """By a status, or row by row."""
    if outcome.code is not grpc.StatusCode.OK:
        return True
    (reply,) = outcome.replies
    return _only_refusals(reply)


def _only_refusals(reply: Any) -> bool:
    if isinstance(reply, cache_pb2.StepResponse):
        parts = [getattr(reply, name) for name in ("free", "commit", "append")]
        done = any(part.ByteSize() and not _only_refusals(part) for part in parts)
        return not done and not any(part.sequence_id for part in reply.allocates)
    codes = getattr(reply, "result_codes", ())
    return bool(codes) and cache_pb2.RESULT_CODE_OK not in codes


def _bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),) if token else ()


_WRONG_METADATA: tuple[Metadata, ...] = (
    (),
    *(_bearer(token) for token in (_STRANGER, _ADMIN, "unknown", "x" * 4000, " ", _TENANT + "x")),
    (("authorization", ""),),
    (("authorization", f"Basic {_TENANT}"),),
    (("authorization", _TENANT),),
    (*_bearer(_TENANT), *_bearer(_STRANGER)),
    (("authorization-bin", f"Bearer {_TENANT}".encode()),),
    (("x-tenant", _TENANT),),
)


_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _wire_calls(channel: grpc.Channel) -> Call:
    """Through the socket. To the wire a unary call is a stream of one request."""
    stubs = {
        name: (channel.stream_stream if method.is_stream else channel.stream_unary)(
            method.path, response_deserializer=method.response.FromString
        )
        for name, method in METHODS.items()
    }

    def call(name: str, messages: Sequence[bytes], metadata: Metadata) -> Outcome:
        try:
            found = stubs[name](iter(messages), timeout=TIMEOUT_S, metadata=metadata)
            if METHODS[name].is_watch:
                # It would go on for ever.
                replies = (next(found),)
                found.cancel()
            else:
                replies = tuple(found) if METHODS[name].is_stream else (found,)
            return Outcome(grpc.StatusCode.OK, "", replies)
        except grpc.RpcError as error:
            return Outcome(error.code(), error.details() or "")

    return call


def _report(figures: Figures, counts: _Counts) -> None:
    figures.calls = counts.calls
    figures.faults["calls refused"] = counts.refused
    codes = ", ".join(f"{count} {code}" for code, count in counts.codes.most_common())
    fields = {
        (name, *path)
        for name, method in METHODS.items()
        for path in field_paths(method.request.DESCRIPTOR)
    }
    figures.notes += [
        f"bad calls: {codes}",
        f"fields made bad: {len(counts.fields)} of {len(fields)}, of {len(METHODS)} RPCs",
        f"right calls in between: {counts.valid}, of which {counts.valid_accepted} were accepted",
    ]
    if counts.fields != fields:
        figures.problems.append(f"fields left out: {sorted(fields - counts.fields)[:10]}")
    if counts.valid_accepted < counts.valid / 2:
        figures.problems.append("most right calls were refused: the state is too poor")
