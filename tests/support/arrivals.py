"""Which calls have come to a daemon, as soon as they do; and calls that end before an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from prefixcache.errors import DeadlineExceededError


class Arrivals:
    """`tracing` of a `running_daemon`. num_by_rpc: calls, and messages of streams."""

    attention = staticmethod(nullcontext)
    trace_id = span_id = ""

    def __init__(self) -> None:
        self.num_by_rpc = Counter[str]()

    def begin(self, call: Any) -> Arrivals:
        self.num_by_rpc[call.rpc.method.name] += 1
        return self

    def end(self, call: Any) -> None:
        pass


def ends_too_early(call: Callable[[float], object], has_come: Callable[[], object]) -> None:
    """The call ends at its time limit, and by then the daemon has it: on a slow machine a later one
    than the first. call: with a time limit in seconds.
    """
    for timeout_s in (0.3, 3.0, 20.0):
        with pytest.raises(DeadlineExceededError):
            call(timeout_s)
        if has_come():
            return
    raise AssertionError("no call has come to the daemon")
