"""A channel that counts calls and does to them what a plan says: cuts them short, or kills.

It stands in for a `grpc.Channel` of the client under load.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from tests.chaos.killer import CLIENT_PHASES, DAEMON_PHASES, kill_myself, kill_order
from tests.chaos.tally import ClientTally

LATE_S = 20.0
"""A call that ends so long after its deadline counts as unanswered: far above a busy machine's."""
LONG_S = 30.0
"""A deadline that must not pass, or a longer one. Some answers the client does not need."""
_CUT_S = (0.0001, 0.02)
_STREAM_CUT_S = (0.0001, 0.2)
_SENT_S = 0.0005


@dataclass(frozen=True, slots=True)
class Kill:
    """This process dies at the next call of that RPC, in that phase."""

    rpc: str
    phase: str


class Link:
    """cut_rate: part of the calls that get a deadline of 0.1 to 20 ms or are cancelled as late.

    kill: set at any time.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        tally: ClientTally,
        rng: random.Random,
        cut_rate: float = 0.0,
    ) -> None:
        self.kill: Kill | None = None
        self.cut_rate = cut_rate
        self._channel = channel
        self._tally = tally
        self._rng = rng

    def unary_unary(self, path: str, **serializers: Any) -> Callable[..., Any]:
        call = self._channel.unary_unary(path, **serializers)
        name = path.rpartition("/")[2]

        def send(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            assert timeout is not None, "every call of the client has a deadline"
            self._die("before it is sent", name)
            options = {"metadata": self._with_kill(metadata, name)}
            begin_s, is_cut = time.monotonic(), self._rng.random() < self.cut_rate
            self._tally.count(name, "started")
            try:
                reply = (
                    self._cut(call, request, options)
                    if is_cut
                    else self._call(call, request, name, {"timeout": timeout, **options})
                )
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                raise self._counted(error, name, timeout, is_cut) from error
            finally:
                if time.monotonic() - begin_s > timeout + LATE_S:
                    self._tally.count(name, "late")
            self._tally.count(name, "answered")
            self._die("after its reply", name)
            return reply

        return send

    def unary_stream(self, path: str, **serializers: Any) -> Any:
        """Watches are left alone."""
        return self._channel.unary_stream(path, **serializers)

    def stream_stream(self, path: str, **serializers: Any) -> Callable[..., Any]:
        call = self._channel.stream_stream(path, **serializers)
        name = path.rpartition("/")[2]

        def open_stream(requests: Iterator[Any], **options: Any) -> Any:
            options["metadata"] = self._with_kill(options.get("metadata"), name)
            replies = _Replies(self, name, call(self._sending(requests, name), **options))
            if self._rng.random() < self.cut_rate:
                threading.Timer(self._any_time(*_STREAM_CUT_S), replies.cancel_by_fault).start()
            return replies

        return open_stream

    def _call(self, call: Any, request: Any, name: str, options: dict[str, Any]) -> Any:
        if self._kills_in(("once it is sent",), name):
            future = call.future(request, **options)
            time.sleep(self._rng.uniform(0.0, _SENT_S))
            self._die("once it is sent", name)
            return future.result()
        return call(request, **options)

    def _counted(self, error: Exception, name: str, timeout: float, is_cut: bool) -> grpc.RpcError:
        """What the client is to see of a call that has failed."""
        if isinstance(error, grpc.FutureCancelledError):
            self._tally.count(name, "cut")
            return _Cut()
        assert isinstance(error, grpc.RpcError)
        code = error.code()
        self._tally.count(name, "cut" if is_cut and code in _CUT_CODES else "refused")
        # It is the client's own library that has given up: no answer came.
        passed = code is grpc.StatusCode.DEADLINE_EXCEEDED
        if passed and not is_cut and timeout >= LONG_S:
            self._tally.count(name, "late")
        return error

    def _cut(self, call: Any, request: Any, options: dict[str, Any]) -> Any:
        """A deadline that may pass, or a cancellation that may come in time."""
        seconds = self._any_time(*_CUT_S)
        if self._rng.random() < 0.5:
            return call(request, timeout=seconds, **options)
        future = call.future(request, timeout=10.0, **options)
        threading.Timer(seconds, future.cancel).start()
        return future.result()

    def _with_kill(self, metadata: Any, name: str) -> Any:
        """Of a call at which the daemon is to kill this process."""
        if not self._kills_in(DAEMON_PHASES, name):
            return metadata
        assert self.kill is not None
        return (*(metadata or ()), *kill_order(self.kill.phase))

    def _any_time(self, shortest_s: float, longest_s: float) -> float:
        """All magnitudes alike: most calls take about a millisecond."""
        return shortest_s * (longest_s / shortest_s) ** self._rng.random()

    def _sending(self, requests: Iterator[Any], name: str) -> Iterator[Any]:
        for request in requests:
            self._die("before it is sent", name)
            self._tally.count(name, "started")
            yield request
            self._die("once it is sent", name)

    def _die(self, phase: str, name: str) -> None:
        if self._kills_in((phase,), name):
            self._tally.killed_by_itself(name, phase)
            kill_myself()

    def _kills_in(self, phases: tuple[str, ...], name: str) -> bool:
        return self.kill is not None and self.kill.rpc == name and self.kill.phase in phases


class _Replies:
    """Those of a stream, counted. Its open requests at the end are what the end has answered."""

    def __init__(self, link: Link, name: str, replies: Any) -> None:
        self._link = link
        self._name = name
        self._replies = replies
        self._was_cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replies, name)

    def cancel_by_fault(self) -> None:
        self._was_cut = True
        self._replies.cancel()

    def __next__(self) -> Any:
        link, tally = self._link, self._link._tally
        try:
            reply = next(self._replies)
        except grpc.RpcError:
            tally.count(self._name, "cut" if self._was_cut else "refused")
            raise
        except StopIteration:
            tally.count(self._name, "refused")
            raise
        tally.count(self._name, "answered")
        link._die(CLIENT_PHASES[2], self._name)
        return reply


class _Cut(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "cancelled by the caller"

    def trailing_metadata(self) -> tuple[()]:
        return ()


_CUT_CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
