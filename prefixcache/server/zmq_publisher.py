"""Events over ZeroMQ, as vLLM 0.33 publishes them.

A PUB socket sends `(topic, number, payload)` for each event; the number is the event's own, 8 bytes
big-endian. A ROUTER socket answers `(b"", number)` with the events from that number on, as far as
the daemon's buffer has them, each as `(b"", topic, number, payload)`, and at the end with
`(b"", b"", -1, b"")`. A subscriber sees a gap in the numbers when it, or this thread, was too slow;
each beginning of a gap is counted, and at times one that a subscriber has just escaped by reading.

One thread owns both sockets, after `start`, and reads the events as any watcher does. Needs pyzmq
(`pip install 'prefixcache[events]'`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import structlog
import zmq

from prefixcache.core.events import Event, EventLog, Reader
from prefixcache.core.sequences import Sequences
from prefixcache.errors import InvalidArgumentError

_END = (-1).to_bytes(8, "big", signed=True)
_MAX_UNREAD = 1024
"""Messages that wait for one peer."""
_MAX_REPLAYS = 16
_REPLAY_RETRY_MS = 10
_LINGER_MS = 500

_log = structlog.get_logger(__name__)


class ZmqPublisher:
    """endpoint, replay_endpoint: `tcp://host:port`, bound at once.

    encode: the payload of an event. max_unread_events: messages that wait for one subscriber; it
    misses the others. max_unread_replies: messages of a replay that wait for its
    peer; the others are sent as it reads. linger_ms: for what the end leaves unsent.

    Raises InvalidArgumentError if an address cannot be bound.
    """

    def __init__(
        self,
        sequences: Sequences,
        encode: Callable[[Event], bytes],
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        max_unread_events: int = _MAX_UNREAD,
        max_unread_replies: int = _MAX_UNREAD,
        linger_ms: int = _LINGER_MS,
    ) -> None:
        log = sequences.pool.events
        assert log is not None
        self._log: EventLog = log
        self._lock = sequences.lock
        self._encode = encode
        self._topic = topic.encode()
        self._linger_ms = linger_ms
        self._next_number = 0
        self._replays: dict[bytes, int] = {}
        self._is_closing = False
        self._context = zmq.Context()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = partial(os.eventfd_write, self._wake_fd, 1)
        try:
            publisher = self._context.socket(zmq.PUB)
            publisher.set_hwm(max_unread_events)
            publisher.setsockopt(zmq.XPUB_NODROP, 1)
            self._events = _bound(publisher, endpoint, "events_zmq")
            self._replay = None
            if replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.set_hwm(max_unread_replies)
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay = _bound(router, replay_endpoint, "events_zmq_replay")
        except InvalidArgumentError:
            self._end()
            os.close(self._wake_fd)
            raise
        self._thread = threading.Thread(target=self._run, name="zmq-events", daemon=True)

    @property
    def endpoint(self) -> str:
        """With the port that was bound."""
        return self._events.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        if self._replay is None:
            return None
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Publish what there is, and end. Does nothing the second time."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.ident is None:
            self._end()
        else:
            self._wake()
            self._thread.join()
        # Not closed by the thread, which may have ended before it was woken.
        os.close(self._wake_fd)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                is_closing = self._is_closing
                num_published = self._publish()
                if is_closing and not num_published:
                    return
                self._go_on_with_replays()
                timeout_ms = 0 if num_published else _REPLAY_RETRY_MS if self._replays else None
                ready = dict(poller.poll(timeout_ms))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                if self._replay in ready:
                    self._take_request()
        finally:
            self._end()

    def _publish(self) -> int:
        """Some of the events that are due; returns how many."""
        with self._lock:
            first, events = self._log.first_number, self._log.read(self._next_number)
            is_late = self._next_number < first
            self._log.num_gaps[Reader.ZMQ] += is_late
            if not events:
                self._log.wake_at_next(self._wake)
        if is_late:
            _log.warning("events lost", publisher="zmq", number=self._next_number, end=first)
        for event in events:
            self._send_to_all(self._message(event))
            self._next_number = event.number + 1
        return len(events)

    def _send_to_all(self, message: tuple[bytes, bytes, bytes]) -> None:
        """Subscribers that have no room for it get none until they have read.

        ZeroMQ says so when the room of one runs out, but not what it drops after that.
        """
        if self._could_send(message):
            return
        self._events.getsockopt(zmq.EVENTS)  # Looks at what was read since: a send seldom does.
        if self._could_send(message):
            return
        with self._lock:
            self._log.num_gaps[Reader.ZMQ] += 1
        self._events.setsockopt(zmq.XPUB_NODROP, 0)
        self._events.send_multipart(message)
        self._events.setsockopt(zmq.XPUB_NODROP, 1)

    def _could_send(self, message: tuple[bytes, bytes, bytes]) -> bool:
        """Send it if every subscriber has room for it."""
        try:
            self._events.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _message(self, event: Event) -> tuple[bytes, bytes, bytes]:
        return self._topic, event.number.to_bytes(8, "big"), self._encode(event)

    def _take_request(self) -> None:
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            _log.warning("no replay request", num_frames=len(frames))
            return
        self._replays.pop(frames[0], None)
        if len(self._replays) == _MAX_REPLAYS:
            del self._replays[next(iter(self._replays))]
        self._replays[frames[0]] = int.from_bytes(frames[2], "big")

    def _go_on_with_replays(self) -> None:
        for peer, number in list(self._replays.items()):
            with self._lock:
                events = self._log.read(min(number, self._next_number))
            # What is not published yet will come by itself.
            due = [event for event in events if number <= event.number < self._next_number]
            messages = [(event.number, self._message(event)) for event in due]
            if not messages:
                messages = [(-1, (b"", _END, b""))]
            self._send(peer, messages)

    def _send(self, peer: bytes, messages: list[tuple[int, tuple[bytes, bytes, bytes]]]) -> None:
        """As many as the peer takes now."""
        assert self._replay is not None
        for number, message in messages:
            try:
                self._replay.send_multipart((peer, b"", *message), zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:  # the peer has gone
                del self._replays[peer]
                return
            if number < 0:
                del self._replays[peer]
                return
            self._replays[peer] = number + 1

    def _end(self) -> None:
        with self._lock:
            self._log.forget(self._wake)
        self._context.destroy(self._linger_ms)


def _bound(socket: zmq.Socket[bytes], endpoint: str, field: str) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidArgumentError(field, f"cannot bind {endpoint}: {error}") from error
    return socket
