"""Sequences that a client may have without knowing: their Allocate or Fork ended without a reply.

The daemon may have made them all the same, and they would live as long as the client makes calls,
since every call keeps their owner alive. Kept here are their retry keys, until the daemon has
freed what they name, or has said often enough that they name nothing. No I/O, the clients send the
Free. Safe to call from many threads; the clock is injected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prefixcache.rpc.wire import read_column32, twin
from prefixcache.types import ResultCode

FREE_TIMEOUT_S = 1.0
"""The Free goes ahead of a call of the caller's, which it may hold up for this long at most."""

_WAITS_S = (0.1, 1.0, 10.0)
"""How long a key that the daemon does not know is left alone before each further time that it is
asked for: the call that it belongs to may still be running there. Then it is forgotten."""


@dataclass(frozen=True, eq=False, slots=True)
class LostRequest:
    """num_unknown: how often the daemon did not know it. due_s: when to ask for it again."""

    request_id: str
    num_unknown: int
    due_s: float


class LostRequests:
    """One client's. An entry stays until the reply about it is in, so a Free may fail or repeat."""

    def __init__(self, owner: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner = owner
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[str, LostRequest] = {}

    def add(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._requests[request_id] = LostRequest(request_id, 0, self._clock())

    def all(self) -> list[LostRequest]:
        with self._lock:
            return list(self._requests.values())

    def due(self) -> list[LostRequest]:
        """Those to ask for now."""
        if not self._requests:
            return []
        now = self._clock()
        return [lost for lost in self.all() if lost.due_s <= now]

    def free_request(self, asked: list[LostRequest]) -> Any:
        return twin("FreeRequest")(
            owner=self._owner, request_ids=[lost.request_id for lost in asked]
        )

    def answered(self, asked: list[LostRequest], reply: Any) -> None:
        """`reply` is the daemon's to `free_request(asked)`."""
        # A daemon of an earlier version ignores request ids, and has no row for them.
        rows = zip(asked, read_column32(reply.result_codes).tolist(), strict=False)
        freed = {lost for lost, code in rows if code == ResultCode.OK}
        with self._lock:
            for lost in asked:
                # Another thread may have asked at the same time: that counts once.
                if self._requests.get(lost.request_id) is lost:
                    del self._requests[lost.request_id]
                    if lost not in freed and lost.num_unknown < len(_WAITS_S):
                        self._requests[lost.request_id] = self._later(lost)

    def _later(self, lost: LostRequest) -> LostRequest:
        due_s = self._clock() + _WAITS_S[lost.num_unknown]
        return LostRequest(lost.request_id, lost.num_unknown + 1, due_s)
