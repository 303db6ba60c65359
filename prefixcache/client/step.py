"""The cache calls of one engine step, collected to be sent as one message of a Step stream.

No I/O, and no order among steps: that is `unanswered_steps`'. A step belongs to one thread or task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from prefixcache.client import sequence_calls
from prefixcache.client.lease import Lease, owner_of
from prefixcache.client.messages import Call
from prefixcache.client.results import ServerInfo
from prefixcache.client.sequence_state import SequenceState, SequenceView
from prefixcache.client.sequence_use import end_move
from prefixcache.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PrefixCacheError,
)
from prefixcache.rpc.status import from_status_message
from prefixcache.rpc.wire import twin
from prefixcache.types import (
    AppendResult,
    CacheUse,
    CommitResult,
    ExtraKeys,
    FullHit,
    ResultCode,
)

ResultT = TypeVar("ResultT")
SequenceT = TypeVar("SequenceT", bound=SequenceView)

_BATCHES = ("free", "commit", "append")
"""In the order in which the daemon applies them."""


class Pending(Generic[ResultT]):
    """The result of one call of a step: there once the step has been answered."""

    def __init__(self, call: Call[Any], make: Callable[[Any], ResultT]) -> None:
        self.call = call
        self._make = make
        self._result: Callable[[], ResultT] | None = None

    def result(self) -> ResultT:
        """What the call alone would have returned or raised.

        Raises FailedPreconditionError as long as the step has not been answered, and the error
        that broke the stream if it never will be.
        """
        if self._result is None:
            raise FailedPreconditionError("the step has not been answered")
        return self._result()

    def answer(self, reply: Any) -> None:
        """reply: the twin message. It advances the sequences that the call is about."""
        try:
            result = self._make(self.call.read(reply))
        except PrefixCacheError as error:
            self.fail(error)
        else:
            self._result = lambda: result

    def fail(self, error: PrefixCacheError) -> None:
        def failed() -> ResultT:
            raise error

        self._result = failed


class Step(Generic[SequenceT]):
    """At most one free, one commit and one append, and any number of new sequences.

    The daemon applies them in that order, whatever the order in which they were added. A refused
    one leaves the others alone. The daemon is told where each sequence stands when the call is
    added: until the step is answered its sequences may be in no other step and in no other call.

    Made by `new_step` of a stream. Raises InvalidArgumentError for what cannot be sent, and
    FailedPreconditionError for a second free, commit or append, for a sequence that is in a step
    without an answer, and for a step that was sent.
    """

    def __init__(
        self,
        lease: Lease,
        info: ServerInfo,
        make_sequence: Callable[[SequenceState], SequenceT],
        unanswered_ids: Set[int],
    ) -> None:
        self.unanswered_ids = unanswered_ids
        self.sequence_ids: set[int] = set()
        self.was_sent = False
        self.error: PrefixCacheError | None = None
        self._number = 0
        self._lease = lease
        self._info = info
        self._make_sequence = make_sequence
        self._batches: dict[str, Pending[Any]] = {}
        self._allocates: list[Pending[SequenceT]] = []
        self._starts: list[tuple[Callable[[], list[int]], list[int]]] = []

    # ---- calls

    def free(self, sequences: Sequence[SequenceT]) -> Pending[list[ResultCode]]:
        """`Client.free`."""
        states = self._states("free", sequences)
        return self._add("free", states, sequence_calls.free(self._lease.owner, states))

    def commit(
        self, sequences: Sequence[SequenceT], num_computed_tokens: npt.ArrayLike
    ) -> Pending[list[CommitResult]]:
        """`Client.commit`."""
        states = self._states("commit", sequences)
        call = sequence_calls.commit(self._lease.owner, states, num_computed_tokens)
        self._starts_at(lambda: [state.num_committed for state in states])
        return self._add("commit", states, call)

    def append(
        self,
        sequences: Sequence[SequenceT],
        tokens: Sequence[npt.ArrayLike],
        num_kv_valid: npt.ArrayLike | None = None,
        num_lookahead_tokens: npt.ArrayLike | None = None,
        *,
        extra_keys: Sequence[ExtraKeys | None] | None = None,
    ) -> Pending[list[AppendResult]]:
        """`Client.append`."""
        states = self._states("append", sequences)
        call = sequence_calls.append(
            self._lease.owner, states, tokens, num_kv_valid, num_lookahead_tokens, extra_keys
        )
        self._starts_at(lambda: [state.num_tokens for state in states])
        return self._add("append", states, call)

    def sequence(
        self,
        tokens: npt.ArrayLike,
        *,
        extra_keys: ExtraKeys | None = None,
        num_lookahead_tokens: int = 0,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        resumed: bool = False,
        request_id: str | None = None,
    ) -> Pending[SequenceT]:
        """`Client.sequence`, `max_step_allocates` times at most; see `Client.server_info`."""
        self._check_not_sent()
        if len(self._allocates) >= self._info.max_step_allocates:
            raise InvalidArgumentError(
                "allocates", f"a step makes at most {self._info.max_step_allocates} sequences"
            )
        call = sequence_calls.allocate(
            self._lease.owner,
            self._info,
            tokens,
            extra_keys=extra_keys,
            num_lookahead_tokens=num_lookahead_tokens,
            cache_use=cache_use,
            full_hit=full_hit,
            resumed=resumed,
            request_id=request_id,
        )
        # With a copy of the tokens, as it may be long until the step is sent.
        pending = Pending(replace(call, request=call.request.whole()), self._make_sequence)
        self._allocates.append(pending)
        return pending

    # ---- for the stream

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Retry keys of what it may have made; see `Call`."""
        return tuple(key for pending in self._allocates for key in pending.call.request_ids)

    @property
    def moved_states(self) -> list[SequenceState]:
        """Of its calls; see `Call.states`. None if no view computes over them."""
        if not self._lease.is_attached:
            return []
        return [state for pending in self._batches.values() for state in pending.call.states]

    @property
    def has_moved(self) -> bool:
        """Some sequence stands elsewhere than when it was added.

        Sent all the same, the step could pass for a repeat of the call that has moved it.
        """
        return any(now() != then for now, then in self._starts)

    def request(self) -> Any:
        """The twin message of the whole step, as it is sent now."""
        pending_calls = (*self._batches.values(), *self._allocates)
        self._number = self._lease.begin(*[pending.call.request for pending in pending_calls])
        return twin("StepRequest")(
            **{name: pending.call.request for name, pending in self._batches.items()},
            allocates=[pending.call.request for pending in self._allocates],
        )

    def answer(self, reply: Any) -> None:
        """Give each call its part of a StepResponse."""
        self._lease.end(self._number)
        refused = {(error.call, error.index): error.status for error in reply.errors}
        for name in _BATCHES:
            if name in self._batches:
                part = getattr(reply, name) if reply.HasField(name) else None
                self._give(self._batches[name], refused.get((name, 0)), part)
        for index, pending in enumerate(self._allocates):
            part = reply.allocates[index] if index < len(reply.allocates) else None
            self._give(pending, refused.get(("allocates", index)), part)
        end_move(self.moved_states)

    def fail(self, error: PrefixCacheError) -> None:
        """No answer will come."""
        self._lease.end(self._number)
        self.error = error
        for pending in (*self._batches.values(), *self._allocates):
            pending.fail(error)

    # ---- inside

    def _states(self, name: str, sequences: Sequence[SequenceT]) -> list[SequenceState]:
        self._check_not_sent()
        if name in self._batches:
            raise FailedPreconditionError(f"the step has its {name} already")
        if owner_of(sequences, self._lease) is not self._lease:
            raise FailedPreconditionError("a sequence is not of the stream's session")
        states = [sequence._state for sequence in sequences]
        if not self.unanswered_ids.isdisjoint([state.sequence_id for state in states]):
            raise FailedPreconditionError("a sequence is in a step that has no answer yet")
        return states

    def _add(self, name: str, states: list[SequenceState], call: Call[ResultT]) -> Pending[ResultT]:
        pending = Pending[ResultT](call, lambda result: result)
        self._batches[name] = pending
        self.sequence_ids.update([state.sequence_id for state in states])
        return pending

    def _starts_at(self, positions: Callable[[], list[int]]) -> None:
        self._starts.append((positions, positions()))

    def _check_not_sent(self) -> None:
        if self.was_sent:
            raise FailedPreconditionError("the step was sent before")

    def _give(self, pending: Pending[Any], status: bytes | None, reply: Any) -> None:
        if status is not None:
            pending.fail(self._lease.failed(from_status_message(status)))
        elif reply is None:
            pending.fail(InternalError("the daemon's answer to the step lacks this call"))
        else:
            pending.answer(reply)
