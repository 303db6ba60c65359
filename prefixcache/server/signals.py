"""Signals that the daemon obeys, read in turn by the main thread.

A handler in Python would not do: it may interrupt another one, or an Event's `wait`, and deadlock
on the Event's lock; and a signal that the kernel gives to a thread of gRPC, as it does when the
process was stopped, does not wake the main thread to run a handler. So each signal is a byte in a
pipe.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
RELOAD_SIGNAL = signal.SIGHUP
_PIPE_BYTES = 65536


class Signals:
    """pipe: the end from which the numbers of signals can be read."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __iter__(self) -> Iterator[signal.Signals]:
        """RELOAD_SIGNAL for each time that some have come, until one of STOP_SIGNALS has."""
        while True:
            received = set(os.read(self._pipe, _PIPE_BYTES))
            if received & STOP_SIGNALS:
                return
            if RELOAD_SIGNAL in received:
                yield RELOAD_SIGNAL


@contextmanager
def obeyed_signals() -> Iterator[Signals]:
    """Only in the main thread. The second of STOP_SIGNALS ends the process at once.

    Afterwards they are ignored: a process that has all but ended would die of one that comes late.
    """
    stops: list[int] = []

    def on_stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        if len(stops) > 1:
            os._exit(128 + number)

    def on_reload(number: int, frame: FrameType | None) -> None:
        """The pipe says it. Without a handler it would end the process."""

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers = dict.fromkeys(STOP_SIGNALS, on_stop) | {RELOAD_SIGNAL: on_reload}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield Signals(read_end)
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(previous_fd)
        os.close(read_end)
        os.close(write_end)
