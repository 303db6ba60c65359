"""The steps of one stream that were sent and have no answer yet, in order.

What the streams for threads and for asyncio have in common; they do the sending. No I/O. One
thread or task at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic

from prefixcache.client.lease import Lease
from prefixcache.client.results import ServerInfo
from prefixcache.client.sequence_state import SequenceState
from prefixcache.client.sequence_use import begin_move
from prefixcache.client.step import SequenceT, Step
from prefixcache.errors import FailedPreconditionError, PrefixCacheError


class UnansweredSteps(Generic[SequenceT]):
    """Makes the steps of a stream and gives them their answers, or the error that ended it.

    lease: owner of all their sequences. It gets the retry keys of what the steps without an answer
        may have made.
    """

    def __init__(
        self,
        lease: Lease,
        info: ServerInfo,
        make_sequence: Callable[[SequenceState], SequenceT],
    ) -> None:
        self._lease = lease
        self._info = info
        self._make_sequence = make_sequence
        self._steps: deque[Step[SequenceT]] = deque()
        self._sequence_ids: set[int] = set()
        self._error: PrefixCacheError | None = None

    def new_step(self) -> Step[SequenceT]:
        return Step(self._lease, self._info, self._make_sequence, self._sequence_ids)

    def request_of(self, step: Step[SequenceT]) -> Any:
        """The twin message of a step that is sent now."""
        if self._error is not None:
            raise self._error
        if step.was_sent:
            raise FailedPreconditionError("the step was sent before")
        if step.unanswered_ids is not self._sequence_ids:
            raise FailedPreconditionError("the step was made by another stream")
        if step.has_moved or not self._sequence_ids.isdisjoint(step.sequence_ids):
            raise FailedPreconditionError("a sequence has had another call since it was added")
        begin_move(step.moved_states)
        request = step.request()
        step.was_sent = True
        self._steps.append(step)
        self._sequence_ids |= step.sequence_ids
        return request

    def has(self, step: Step[SequenceT]) -> bool:
        """It was sent and has no answer. Raises FailedPreconditionError if it was not sent, and
        the error that ended the stream if it will have no answer."""
        if not step.was_sent:
            raise FailedPreconditionError("the step was not sent")
        if step.error is not None:
            raise step.error
        return step in self._steps

    def answered(self, reply: Any) -> None:
        """The answer to the step that was sent first."""
        step = self._steps.popleft()
        self._sequence_ids -= step.sequence_ids
        step.answer(reply)

    def fail(self, error: PrefixCacheError) -> None:
        """The stream is over; the first call says why."""
        self._error = self._error or error
        for step in self._steps:
            step.fail(self._error)
            self._lease.lost_requests.add(step.request_ids)
        self._steps.clear()
        self._sequence_ids.clear()
