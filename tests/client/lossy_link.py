"""A channel that loses, repeats and delays calls, in front of a real one.

A call may be lost on the way out (the daemon never sees it), lost on the way back (it has done its
part, and the caller hears nothing), arrive twice, and arrive once more much later, after others:
also one that the caller has given up. What the caller sees of a loss is UNAVAILABLE.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

UNTOUCHED = frozenset({"GetServerInfo", "GetStats", "ListSequences", "ResetCache"})
_HOW = ("arrives", "lost out", "lost back", "twice")
_WEIGHTS = (6, 2, 2, 2)


class Lost(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "lost on the way"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class LossyLink:
    """Stands in for a `grpc.Channel`. `counts` says what has happened to calls."""

    def __init__(self, channel: grpc.Channel, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.is_lossy = True
        self._channel = channel
        self._rng = rng
        self._late: list[Callable[[], Any]] = []

    def unary_unary(
        self, path: str, request_serializer: Callable[[Any], bytes], **options: Any
    ) -> Callable[..., Any]:
        call = self._channel.unary_unary(path, **options)
        name = path.rpartition("/")[2]

        def send(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            data = request_serializer(request)
            if name in UNTOUCHED or not self.is_lossy:
                return call(data, timeout=timeout, metadata=metadata)
            return self._send(lambda: call(data, timeout=30.0, metadata=metadata))

        return send

    def stream_stream(self, path: str, **serializers: Any) -> Any:
        return self._channel.stream_stream(path, **serializers)

    def deliver_late_copies(self, most: int) -> None:
        """In any order; nobody hears the answers."""
        self._rng.shuffle(self._late)
        for _ in range(min(most, len(self._late))):
            self._answer_of(self._late.pop())

    def _send(self, arrive: Callable[[], Any]) -> Any:
        self.deliver_late_copies(self._rng.randrange(3))
        how = self._rng.choices(_HOW, _WEIGHTS)[0]
        self.counts[how] += 1
        if self._rng.randrange(2):
            self._late.append(arrive)
        if how == "lost out":
            raise Lost
        if how != "arrives":
            self._answer_of(arrive)
        if how == "lost back":
            raise Lost
        return arrive()

    def _answer_of(self, arrive: Callable[[], Any]) -> None:
        try:
            arrive()
        except grpc.RpcError as refusal:
            self.counts[refusal.code().name] += 1
        else:
            self.counts["answered"] += 1
