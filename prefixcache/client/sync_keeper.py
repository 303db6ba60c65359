"""Keeps a session alive from a thread of its own. `aio_keeper` has its twin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import grpc

from prefixcache.client import session_calls
from prefixcache.client.home_process import HomeProcess
from prefixcache.client.lease import Lease
from prefixcache.rpc.status import from_rpc_error

FIRST_WAIT_S = 0.05
"""Between two attempts to reconnect; doubled for each further one, up to the beats' interval."""

FIRST_BEAT_WAIT_S = 1.0


class SessionKeeper:
    """Beats three times in a session's TTL, and reconnects when its stream breaks.

    Ends when the session is lost, which its lease knows then, when told to, and with the channel.
    It knows no client, so that one which is forgotten without `close` can go; its thread keeps no
    interpreter from exiting.
    """

    def __init__(self, open_stream: Callable[..., Any], lease: Lease, home: HomeProcess) -> None:
        self._open_stream = open_stream
        self._lease = lease
        self._home = home
        # Reentrant: `stop` may come of a garbage collection in any thread, this one's too.
        self._changed = threading.Condition(threading.RLock())
        self._is_stopped = False
        self._stream: _Stream | None = None
        self._was_tried = threading.Event()
        threading.Thread(target=self._run, name="session-keeper", daemon=True).start()

    def wait_for_first_beat(self) -> None:
        """Until it is answered or fails, or for FIRST_BEAT_WAIT_S.

        From then on the daemon notices the end of this process. Sequences made before would wait
        for the session's TTL.
        """
        self._was_tried.wait(FIRST_BEAT_WAIT_S)

    def stop(self) -> None:
        """No more beats. Does not wait; the daemon sees the stream end. Nothing in a child."""
        if not self._home.is_here:
            return
        with self._changed:
            self._is_stopped = True
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()

    def _run(self) -> None:
        wait_s = 0.0
        while self._goes_on_after(wait_s):
            try:
                was_answered = self._beat_on_one_stream()
            except ValueError:  # the channel is closed
                return
            longer_s = max(2 * wait_s, FIRST_WAIT_S)
            wait_s = 0.0 if was_answered else min(longer_s, self._lease.beat_interval_s)

    def _beat_on_one_stream(self) -> bool:
        """Until it has broken; returns whether a beat was answered."""
        was_answered = False
        with self._changed:
            self._stream = stream = _Stream(self._open_stream, self._on_end)
        try:
            while self._goes_on_after(0.0):
                boot_id = stream.beat(session_calls.keep_alive(self._lease)).boot_id
                self._lease.answered_by(boot_id)
                was_answered = True
                self._was_tried.set()
                self._goes_on_after(self._lease.beat_interval_s, stream)
        except StopIteration:
            pass
        except grpc.RpcError as failure:
            self._lease.failed(from_rpc_error(failure))
        finally:
            self._was_tried.set()
            stream.cancel()
        return was_answered

    def _goes_on_after(self, seconds: float, stream: _Stream | None = None) -> bool:
        """Wait, but not after the end of the stream; False once there is no more to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or (stream is not None and stream.has_ended), seconds
            )
            return not self._is_stopped and not self._lease.is_lost

    def _on_end(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Stream:
    """One KeepAlive stream."""

    def __init__(self, open_stream: Callable[..., Any], on_end: Callable[[], None]) -> None:
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._replies = open_stream(iter(self._requests.get, None), wait_for_ready=True)
        if not self._replies.add_callback(on_end):
            on_end()

    @property
    def has_ended(self) -> bool:
        return not self._replies.is_active()

    def beat(self, request: Any) -> Any:
        """Its answer. Raises StopIteration or RpcError once the stream has ended."""
        self._requests.put(request)
        return next(self._replies)

    def cancel(self) -> None:
        self._requests.put(None)
        self._replies.cancel()
