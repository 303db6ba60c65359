"""Sequences keep their blocks while an attached view computes over them.

For calls of its own the daemon sees to that: what is freed meanwhile goes when they have ended. It
does not see a view's calls, which would write into blocks that are somebody else's by then. So no
call that may give blocks away is sent while a view's call runs, and no view's call begins while one
is under way. One that has had no answer counts as under way until such a call is answered: the
daemon may have done its part. Safe to use from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefixcache.client.lease import Lease
from prefixcache.client.sequence_state import SequenceState
from prefixcache.errors import (
    CancelledCallError,
    DeadlineExceededError,
    PrefixCacheError,
    SequenceBusyError,
    SequenceNotFoundError,
    UnavailableError,
)

_lock = threading.Lock()
_NO_ANSWER = (CancelledCallError, DeadlineExceededError, UnavailableError)


@contextmanager
def in_use(states: Sequence[SequenceState]) -> Iterator[None]:
    """For a view's call. Raises SequenceBusyError, or SequenceNotFoundError."""
    with _lock:
        for state in states:
            if state.is_freed:
                raise SequenceNotFoundError(state.sequence_id)
            if state.is_moving:
                raise SequenceBusyError(state.sequence_id)
        for state in states:
            state.num_view_calls += 1
    try:
        yield
    finally:
        with _lock:
            for state in states:
                state.num_view_calls -= 1


@contextmanager
def moving(states: Sequence[SequenceState], lease: Lease | None) -> Iterator[None]:
    """For a call that may give blocks of theirs away, and its answer. Raises SequenceBusyError.

    An end by an error that does not come of the daemon leaves them moving. lease: theirs; nothing
    is done for one that no view is of, nor without states.
    """
    if lease is None or not lease.is_attached:
        yield
        return
    begin_move(states)
    try:
        yield
    except _NO_ANSWER:
        raise
    except PrefixCacheError:
        end_move(states)
        raise
    else:
        end_move(states)


def begin_move(states: Sequence[SequenceState]) -> None:
    """Such a call is sent. Raises SequenceBusyError."""
    with _lock:
        for state in states:
            if state.num_view_calls:
                raise SequenceBusyError(state.sequence_id)
        for state in states:
            state.is_moving = True


def end_move(states: Sequence[SequenceState]) -> None:
    """It was answered, and the states are as the answer says."""
    for state in states:
        state.is_moving = False
