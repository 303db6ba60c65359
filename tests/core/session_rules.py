"""The rules of the state machine that open, keep alive, break and close sessions.

A rule names a session by a slot, which holds the one that was opened last there, ended or not, so
that calls in sessions that are gone, or that never were, are made too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from prefixcache.core.sequences import Sequences
from prefixcache.core.sessions import SESSION_ID_BYTES, SessionLimits
from tests.support.model import Model

OWNERS = (b"one", b"two", b"three")
SLOTS = (b"slot 0", b"slot 1", b"slot 2")
TTLS_S = (4.0, 12.0, 12.0)
WRITERS = (0, 1, 2)
OPEN_KEYS = ("", "", "o", "p")
LIMITS = SessionLimits(max_sessions=3, max_ttl_s=60.0, max_sequences=4, reconnect_grace_s=2.0)

SLOT = st.sampled_from(SLOTS)


class SessionRules:
    """`slots` has the model's name of each slot's session, `session_ids` the real id of a name,
    `streams` the number of a session's KeepAlive stream, and `processes` the attachments of the
    writers that run now; `num_released` blocks came back from quarantine as they ended."""

    sequences: Sequences
    model: Model
    both: Callable[..., Any]
    repeatable: Callable[[Callable[[], None]], None]

    def start_sessions(self) -> None:
        self.slots: dict[bytes, bytes] = {}
        self.session_ids: dict[bytes, bytes] = {}
        self.streams: dict[bytes, int] = {}
        self.processes = list(WRITERS)
        self.num_released = 0

    def owner_in(self, slot: bytes) -> bytes:
        """The model's owner: a session's name, or one of `OWNERS` itself."""
        return slot if slot in OWNERS else self.slots.get(slot, b"session 0")

    def real(self, owner: bytes) -> bytes:
        """The owner that the real calls name."""
        if owner.startswith(b"session"):
            return self.session_ids.get(owner, bytes(SESSION_ID_BYTES))
        return owner

    @rule(slot=SLOT, ttl_s=st.sampled_from(TTLS_S), request_id=st.sampled_from(OPEN_KEYS))
    def open_session(self, slot: bytes, ttl_s: float, request_id: str) -> None:
        def step() -> None:
            result = self.both(
                lambda: self.sequences.live.sessions.open(ttl_s, "a client", request_id),
                lambda: self.model.open_session(ttl_s, "a client", request_id),
            )
            if result is not None:
                session, name = result
                assert self.session_ids.setdefault(name, session.session_id) == session.session_id
                self.slots[slot] = name

        self.repeatable(step)

    @rule(slot=SLOT)
    def connect_session(self, slot: bytes) -> None:
        name = self.owner_in(slot)
        result = self.both(
            lambda: self.sequences.live.sessions.connect(self.real(name)),
            lambda: self.model.connect(name),
        )
        if result is not None:
            self.streams[name] = result[0]

    @rule(slot=SLOT)
    def break_stream(self, slot: bytes) -> None:
        """Of a session that has ended too: the stream outlives it."""
        name = self.owner_in(slot)
        stream = self.streams.pop(name, None)
        if stream is not None:
            self.sequences.live.sessions.disconnect(self.real(name), stream)
            self.model.disconnect(name)

    @rule(slot=SLOT)
    def close_session(self, slot: bytes) -> None:
        name = self.owner_in(slot)

        def step() -> None:
            result = self.both(
                lambda: self.sequences.live.close_session(self.real(name)),
                lambda: self.model.close_session(name),
            )
            if result is not None:
                assert result[0] == result[1]

        self.repeatable(step)

    @rule(slot=SLOT, writer=st.sampled_from(WRITERS))
    def attach(self, slot: bytes, writer: int) -> None:
        name, process = self.owner_in(slot), self.processes[writer]

        def step() -> None:
            if process in self.processes:  # else it has ended, and asks for nothing again
                self.both(
                    lambda: self.sequences.live.sessions.attach(self.real(name), process),
                    lambda: self.model.attach(name, process),
                )

        self.repeatable(step)

    @rule()
    def write_strays(self) -> None:
        """Processes that stood still go on, and find out later that their sessions are over."""
        self.model.write_strays()

    @rule(writer=st.sampled_from(WRITERS))
    def end_process(self, writer: int) -> None:
        """Another one takes its place, with a number of its own."""
        process = self.processes[writer]
        self.processes[writer] = max(self.processes) + 1
        freed = self.sequences.live.end_writer(process)
        self.num_released += freed
        assert freed == self.model.end_process(process)
        assert self.sequences.live.end_writer(process) == 0

    def sessions_agree(self) -> None:
        sessions = self.sequences.live.sessions
        assert [session.session_id for session in sessions] == [
            self.real(name) for name in self.model.sessions
        ]
        for session, expected in zip(sessions, self.model.sessions.values(), strict=True):
            assert session.expires_at_s == expected.renewed_s + expected.ttl_s
            assert (session.stream is not None) == expected.has_stream
            assert session.broken_at_s == expected.broken_s
            assert session.attachments == expected.attachments & self.model.running
        held = {info.digest: info.num_sequences for info in self._listed()}
        for session in sessions:
            owned = [s for s in self.sequences.live.by_id.values() if s.owner == session.session_id]
            assert held[session.digest] == len(owned) <= LIMITS.max_sequences

    def _listed(self) -> list[Any]:
        return self.sequences.listings.sessions_after(0, LIMITS.max_sessions)
