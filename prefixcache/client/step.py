"""The cache calls of one engine step, collected to be sent as one message of a Step stream.

No I/O: `sync_steps` and `aio_steps` send steps and hand them the answers. A step belongs to one
thread or task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt

from prefixcache.client import sequence_calls
from prefixcache.client.messages import Call
from prefixcache.client.results import ServerInfo
from prefixcache.client.sequence_state import SequenceState
from prefixcache.errors import FailedPreconditionError, InternalError, PrefixCacheError
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
SequenceT = TypeVar("SequenceT", bound="_HasState")


class _HasState(Protocol):
    @property
    def _state(self) -> SequenceState: ...


class Pending(Generic[ResultT]):
    """The result of one call of a step: there once the step has been answered."""

    def __init__(self, call: Call[Any], make: Callable[[Any], ResultT]) -> None:
        self.call = call
        self._make = make
        self._result: ResultT | None = None
        self._error: PrefixCacheError | None = None
        self.is_done = False

    def result(self) -> ResultT:
        """What the call alone would have returned or raised.

        Raises FailedPreconditionError as long as the step has not been answered.
        """
        if not self.is_done:
            raise FailedPreconditionError("the step has not been answered")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # it is there if no error is

    def _answer(self, reply: Any) -> None:
        try:
            self._result = self._make(self.call.read(reply))
        except PrefixCacheError as error:
            self._error = error
        self.is_done = True

    def _fail(self, error: PrefixCacheError) -> None:
        self._error = error
        self.is_done = True


class Step(Generic[SequenceT]):
    """At most one free, one commit and one append, and any number of new sequences.

    The daemon applies them in that order, whatever the order in which they were added. Made by
    `new_step` of a stream; a sequence may be in no step that is sent and not answered.
    """

    def __init__(
        self,
        owner: bytes,
        info: ServerInfo,
        make_sequence: Callable[[SequenceState], SequenceT],
        unanswered: set[int],
    ) -> None:
        self._owner = owner
        self._info = info
        self._make_sequence = make_sequence
        self._unanswered = unanswered
        self._calls: dict[str, Pending[Any]] = {}
        self._allocates: list[Pending[SequenceT]] = []
        self.sequence_ids: set[int] = set()
        self.was_sent = False

    def free(self, sequences: Sequence[SequenceT]) -> Pending[list[ResultCode]]:
        """`Client.free`."""
        states = self._states(sequences)
        return self._add("free", sequence_calls.free(self._owner, states))

    def commit(
        self, sequences: Sequence[SequenceT], num_computed_tokens: npt.ArrayLike
    ) -> Pending[list[CommitResult]]:
        """`Client.commit`."""
        states = self._states(sequences)
        return self._add("commit", sequence_calls.commit(self._owner, states, num_computed_tokens))

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
        call = sequence_calls.append(
            self._owner,
            self._states(sequences),
            tokens,
            num_kv_valid,
            num_lookahead_tokens,
            extra_keys,
        )
        return self._add("append", call)

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
        """`Client.sequence`."""
        call = sequence_calls.allocate(
            self._owner,
            self._info,
            tokens,
            extra_keys=extra_keys,
            num_lookahead_tokens=num_lookahead_tokens,
            cache_use=cache_use,
            full_hit=full_hit,
            resumed=resumed,
            request_id=request_id,
        )
        pending = Pending(call, self._make_sequence)
        self._allocates.append(pending)
        return pending

    @property
    def is_answered(self) -> bool:
        return all(pending.is_done for pending in self._all())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Retry keys of what it may have made; see `Call`."""
        return tuple(key for pending in self._allocates for key in pending.call.request_ids)

    def request(self) -> Any:
        """The twin message of the whole step."""
        return twin("StepRequest")(
            **{name: pending.call.request for name, pending in self._calls.items()},
            allocates=[pending.call.request for pending in self._allocates],
        )

    def answer(self, reply: Any) -> None:
        """Give each call its part of a StepResponse."""
        refused = {(error.call, error.index): error.status for error in reply.errors}
        for name in ("free", "commit", "append"):
            if name in self._calls:
                self._give(self._calls[name], refused.get((name, 0)), getattr(reply, name))
        if len(reply.allocates) != len(self._allocates):
            self.fail(InternalError("the daemon answered another number of allocates"))
        for index, pending in enumerate(self._allocates):
            self._give(pending, refused.get(("allocates", index)), reply.allocates[index])

    def fail(self, error: PrefixCacheError) -> None:
        """No answer will come to the calls that have none."""
        for pending in self._all():
            if not pending.is_done:
                pending._fail(error)

    def _give(self, pending: Pending[Any], status: bytes | None, reply: Any) -> None:
        if status is not None:
            pending._fail(from_status_message(status))
        else:
            pending._answer(reply)

    def _all(self) -> list[Pending[Any]]:
        return [*self._calls.values(), *self._allocates]

    def _states(self, sequences: Sequence[SequenceT]) -> list[SequenceState]:
        states = [sequence._state for sequence in sequences]
        for state in states:
            if state.sequence_id in self._unanswered:
                raise FailedPreconditionError(
                    f"sequence {state.sequence_id:#018x} is in a step that has no answer yet"
                )
        self.sequence_ids.update(state.sequence_id for state in states)
        return states

    def _add(self, name: str, call: Call[ResultT]) -> Pending[ResultT]:
        if name in self._calls:
            raise FailedPreconditionError(f"the step has its {name} already")
        pending = Pending[ResultT](call, lambda result: result)
        self._calls[name] = pending
        return pending
