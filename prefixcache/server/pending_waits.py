"""Allocates that wait for blocks which another sequence is computing.

Owns how a call waits: in whose place, until when, and what ends it early. What it waits for is the
core's (`prefixcache.core.pending`). A waiting call holds no lock, no blocks and no thread's place;
it looks again each time that it is woken, and applies under the same lock under which it looked, so
that of all that find the work undone one does it and the others see that. Safe to use from many
threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import grpc

from prefixcache.core.sequences import Sequences
from prefixcache.errors import CancelledCallError, DeadlineExceededError
from prefixcache.server.allocation import Allocation
from prefixcache.server.places import Places
from prefixcache.types import AllocateResult


class PendingWaits:
    """lent_place: lets another thread run while the calling one waits.

    places: of calls that wait, since each has a thread; one more is answered without the wait.
    """

    def __init__(
        self,
        sequences: Sequences,
        lent_place: Callable[[], AbstractContextManager[None]],
        places: Places,
    ) -> None:
        self._sequences = sequences
        self._lent_place = lent_place
        self._places = places

    def allocate(
        self, allocation: Allocation, wait_s: float, tenant: str, context: grpc.ServicerContext
    ) -> AllocateResult:
        """What it gives, after at most `wait_s` seconds, in a place of the tenant's.

        Raises what it does, and CancelledCallError or DeadlineExceededError if the caller has gone
        while it waited: nothing was applied then.
        """
        if not self._places.take(tenant):
            with self._sequences.lock:
                return allocation.apply()
        try:
            return self._wait(allocation, time.monotonic() + wait_s, context)
        finally:
            self._places.give_back(tenant)

    def wake_all(self) -> None:
        """Let all look again: the daemon is draining."""
        with self._sequences.lock:
            self._sequences.pending.wake_all()

    def _wait(
        self, allocation: Allocation, until_s: float, context: grpc.ServicerContext
    ) -> AllocateResult:
        woken = threading.Event()
        # Of a call that has ended already this does nothing, and `_check_caller` sees it.
        context.add_callback(woken.set)
        while True:
            woken.clear()
            _check_caller(context)
            left_s = until_s - time.monotonic()
            with self._sequences.lock:
                waiter = allocation.look(woken.set) if left_s > 0 else None
                if waiter is None:
                    return allocation.apply()
            try:
                with self._lent_place():
                    woken.wait(left_s)
            finally:
                with self._sequences.lock:
                    self._sequences.pending.stop_waiting(waiter)


def _check_caller(context: grpc.ServicerContext) -> None:
    # gRPC reports a passed deadline a little late.
    if context.time_remaining() == 0:
        raise DeadlineExceededError("the deadline passed while blocks were pending")
    if not context.is_active():
        raise CancelledCallError("the call ended while blocks were pending")
