"""Sequences keep their blocks while an attached view computes over them.

For calls of its own the daemon sees to that: what is freed meanwhile goes when they have ended. It
does not see a view's calls, which would write into blocks that are somebody else's by then. So a
client asks for nothing that gives blocks away while one runs, and begins none once it has asked for
a sequence's end, whatever the daemon answers. Safe to use from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefixcache.client.sequence_state import SequenceState
from prefixcache.errors import SequenceBusyError, SequenceNotFoundError

_lock = threading.Lock()


@contextmanager
def in_use(states: Sequence[SequenceState]) -> Iterator[None]:
    """For a view's call. Raises SequenceNotFoundError for one that was to be freed."""
    with _lock:
        for state in states:
            if state.is_ending:
                raise SequenceNotFoundError(state.sequence_id)
        for state in states:
            state.num_view_calls += 1
    try:
        yield
    finally:
        with _lock:
            for state in states:
                state.num_view_calls -= 1


def check_unused(states: Sequence[SequenceState]) -> None:
    """Ahead of a call that may give blocks of theirs away. Raises SequenceBusyError."""
    for state in states:
        if state.num_view_calls:
            raise SequenceBusyError(state.sequence_id)


def begin_end(states: Sequence[SequenceState]) -> None:
    """Ahead of a call that frees them. Raises SequenceBusyError."""
    with _lock:
        check_unused(states)
        for state in states:
            state.is_ending = True
