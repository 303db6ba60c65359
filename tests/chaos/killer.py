"""Ends client processes by SIGKILL at a chosen moment of a chosen call.

Three of the moments are the client's own, and two are the daemon's: there an interceptor of the
server kills the process that the call's metadata names, which proves that the call was in flight.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

CLIENT_PHASES = ("before it is sent", "once it is sent", "after its reply")
DAEMON_PHASES = ("as the daemon has it", "once it is applied")
PHASES = (CLIENT_PHASES[0], CLIENT_PHASES[1], *DAEMON_PHASES, CLIENT_PHASES[2])
METADATA_KEY = "chaos-kill"
_DEATH_S = 2.0


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_DEATH_S)  # the signal may be taken by another thread first


def kill_order(phase: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call during which the daemon is to kill this process."""
    return ((METADATA_KEY, f"{DAEMON_PHASES.index(phase)} {os.getpid()}"),)


class ClientKiller(grpc.ServerInterceptor):
    """Counts whom it killed by RPC and phase."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def counts(self) -> list[tuple[str, str, int]]:
        with self._lock:
            return [(method, phase, count) for (method, phase), count in self._counts.items()]

    def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = continuation(details)
        order = dict(details.invocation_metadata or ()).get(METADATA_KEY)
        if order is None or handler is None:
            return handler
        phase, pid = order.split()
        name = details.method.rpartition("/")[2]
        return self._killing(handler, name, DAEMON_PHASES[int(phase)], int(pid))

    def _killing(self, handler: Any, name: str, phase: str, pid: int) -> Any:
        answer = handler.stream_unary or handler.stream_stream

        def arriving(requests: Iterator[bytes]) -> Iterator[bytes]:
            for request in requests:
                if phase == DAEMON_PHASES[0]:
                    self._kill(name, phase, pid)
                yield request

        def unary(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            try:
                return answer(arriving(requests), context)
            finally:
                self._kill(name, phase, pid)

        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            for reply in answer(arriving(requests), context):
                self._kill(name, phase, pid)
                yield reply

        run, make = (
            (unary, grpc.stream_unary_rpc_method_handler)
            if handler.stream_unary
            else (stream, grpc.stream_stream_rpc_method_handler)
        )
        # What says in which threads it runs, and whether its request is asked for early.
        vars(run).update(vars(answer))
        return make(run, handler.request_deserializer, handler.response_serializer)

    def _kill(self, name: str, phase: str, pid: int) -> None:
        """Returns once the process is dead. One that is dead already is not counted."""
        if not _is_alive(pid):
            return
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + _DEATH_S
        while _is_alive(pid) and time.monotonic() < until_s:
            time.sleep(0.0005)
        with self._lock:
            self._counts[name, phase] += 1


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
