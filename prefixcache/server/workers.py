"""Threads that answer calls, of which the one that was busy last takes the next call.

What finds no thread waits, the calls of each tenant in order and the tenants in turn, but neither
too many nor for too long: the rest is handed to threads whose only work is to refuse.

`ThreadPoolExecutor` gives calls to its threads in turn. Once a burst has started all of them, each
call wakes one whose stack and caches have gone cold: with 16 threads an empty call took 10 to 40 us
longer of 300 (medians of several runs, both kinds in one server, in turn).
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from prefixcache.errors import PrefixCacheError, TooManyCallsError, WaitedTooLongError
from prefixcache.server.fair_queue import FairQueue
from prefixcache.server.incoming_calls import TenantOf, no_tenant, with_request_asked_for
from prefixcache.server.places import Places, Tenants, nobody

_REFUSING_THREADS = 2
_MAX_STAND_INS = 256


class WorkQueueLimits(NamedTuple):
    """Of work that finds no thread: how much of it waits, and for how long."""

    max_waiting: int = sys.maxsize
    max_wait_s: float = math.inf


_Work = tuple[Future[Any], Callable[[], Any], float]
"""With the time at which it was submitted."""
_Mailbox = SimpleQueue[_Work | None]
"""Of one thread, which ends at None."""


class _OfThread(threading.local):
    """Of the work that a thread does: when it was submitted, and why it is to be refused."""

    submitted_s = 0.0
    refusal: PrefixCacheError | None = None


class Workers(ThreadPoolExecutor):
    """At most `num_threads` threads, started when they are needed.

    tenants: each can always have its share of what may wait. tenant_of: says whose a call is.

    A thread that waits for something else may lend its place: then one more is started. Once it
    goes on, there are more threads than `num_threads`, until one of them has nothing to do. So it
    is with threads that peers hold up (`stand_in_for`).

    A ThreadPoolExecutor, since gRPC takes no other for the threads of a handler. The threads do not
    keep the process alive.

    Work beyond `limits` is called all the same, by other threads, and has to ask `refusal`: only a
    handler can end its call with a status.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        limits: WorkQueueLimits | None = None,
        *,
        tenants: Tenants = nobody,
        tenant_of: TenantOf = no_tenant,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_threads, name)
        self._num_threads, self._name = num_threads, name
        self._limits = limits or WorkQueueLimits()
        self._tenant_of = tenant_of
        self._clock = clock
        self._refusing = ThreadPoolExecutor(_REFUSING_THREADS, f"{name}-refusing")
        self._of_thread = _OfThread()
        self._guard = threading.Lock()
        self._became_idle = threading.Condition(self._guard)
        self._started: dict[threading.Thread, None] = {}
        self._num_made = 0
        self._num_busy = 0
        self._num_ended = 0
        self._num_lent = 0
        self._num_stand_ins = 0
        self._idle: list[_Mailbox] = []
        places = Places(self._limits.max_waiting, tenants, with_nobody=True)
        self._waiting: FairQueue[_Work] = FairQueue(places)
        self._is_shut = False

    @property
    def num_waiting(self) -> int:
        """Pieces of work without a thread."""
        return len(self._waiting)

    @property
    def num_ended(self) -> int:
        """Pieces of work that were done, not counting refused ones."""
        return self._num_ended

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises RuntimeError after `shutdown`."""
        future: Future[Any] = Future()
        with self._guard:
            if self._is_shut:
                raise RuntimeError(f"the threads {self._name} were shut down")
            if self._idle:
                self._num_busy += 1
                mailbox = self._idle.pop()
            else:
                work = future, partial(fn, *args, **kwargs), self._clock()
                self._submit_without_idle(work, args)
                return future
        call = partial(fn, *with_request_asked_for(args), **kwargs)
        mailbox.put((future, call, self._clock()))
        return future

    def refusal(self) -> PrefixCacheError | None:
        """Why the work that this thread does is to be refused; None if it is not."""
        return self._of_thread.refusal

    def queue_s(self) -> float:
        """How long the work that this thread has just begun waited for it."""
        return self._clock() - self._of_thread.submitted_s

    def refuse_late(self) -> None:
        """Refuse what has waited too long. To be called now and then."""
        oldest_s = self._clock() - self._limits.max_wait_s
        with self._guard:
            for work in self._waiting.take_late(lambda work: work[2] <= oldest_s):
                self._refuse(work, WaitedTooLongError(self._limits.max_wait_s))

    @contextmanager
    def lent_place(self) -> Iterator[None]:
        """The calling thread, which is one of these, only waits meanwhile."""
        with self._guard:
            self._num_lent += 1
            self._start_waiting()
        try:
            yield
        finally:
            with self._guard:
                self._num_lent -= 1

    def stand_in_for(self, num_held_up: int) -> None:
        """So many of the threads wait for their peers now. To be called now and then.

        Twice as many others may run meanwhile, since what they do next may be held up as well.
        """
        with self._guard:
            self._num_stand_ins = min(2 * num_held_up, _MAX_STAND_INS)
            self._start_waiting()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether all that was submitted is done within that time, lent places given back too."""
        with self._guard:
            return self._became_idle.wait_for(lambda: not self._num_busy, timeout_s)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they have done what was submitted."""
        with self._guard:
            self._is_shut = True
            while cancel_futures and self._waiting:
                self._waiting.take()[0].cancel()
            while self._idle:
                self._idle.pop().put(None)
            started = list(self._started)
        self._refusing.shutdown(wait)
        for thread in started if wait else ():
            thread.join()

    def _submit_without_idle(self, work: _Work, args: tuple[Any, ...]) -> None:
        """To a new thread, to what waits, or to those that refuse."""
        if not self._waiting and self._has_place() and self._start(work):
            return
        if self._waiting.put(self._tenant_of(args), work):
            self._start_waiting()
        else:
            self._refuse(work, TooManyCallsError(self._limits.max_waiting))

    @property
    def _num_places(self) -> int:
        return self._num_threads + self._num_lent + self._num_stand_ins

    def _has_place(self) -> bool:
        return len(self._started) < self._num_places

    def _start_waiting(self) -> None:
        while self._waiting and self._has_place() and self._start(self._waiting.first()):
            self._waiting.take()

    def _start(self, work: _Work) -> bool:
        """False if the host has no thread left: the work waits for one that there is."""
        mailbox: _Mailbox = SimpleQueue()
        mailbox.put(work)
        name = f"{self._name}_{self._num_made}"
        thread = threading.Thread(target=self._run, args=(mailbox,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._num_made += 1
        self._num_busy += 1
        self._started[thread] = None
        return True

    def _run(self, mailbox: _Mailbox) -> None:
        while (work := mailbox.get()) is not None:
            while work is not None:
                self._do(work)
                work = self._next(mailbox)

    def _next(self, mailbox: _Mailbox) -> _Work | None:
        """What waits; None if the thread is to look into its mailbox."""
        with self._guard:
            self._num_ended += 1
            if self._waiting:
                return self._waiting.take()
            if self._is_shut:
                mailbox.put(None)
            elif len(self._started) > self._num_places:
                del self._started[threading.current_thread()]
                mailbox.put(None)
            else:
                self._idle.append(mailbox)
            self._num_busy -= 1
            if not self._num_busy:
                self._became_idle.notify_all()
            return None

    def _refuse(self, work: _Work, refusal: PrefixCacheError) -> None:
        self._refusing.submit(self._do_as_refused, work, refusal)

    def _do_as_refused(self, work: _Work, refusal: PrefixCacheError) -> None:
        self._of_thread.refusal = refusal
        self._do(work)

    def _do(self, work: _Work) -> None:
        future, call, self._of_thread.submitted_s = work
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is the caller's, who has the future
            future.set_exception(error)
        else:
            future.set_result(result)
