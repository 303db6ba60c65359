"""Memory that a client shares with its daemon, so that large tensors are copied and not sent.

Only on a Unix socket, with a daemon that has the capability "arenas". Tensors are copied into a
region of the arena, the call says where they are, and the result is copied out of it: it is the
caller's own, so nothing that the caller keeps holds up a region, and a forked child, which has
nothing of the arena, has the result.

Only a reply tells that the daemon is done with a region. After a call that failed, or was given up,
the whole arena is given up: its other calls end in it, later ones get another. So the daemon never
reads or writes a region that is another call's by then.

`Arenas` may be used by many threads.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import insort
from collections.abc import Callable
from ctypes import Array, c_uint8
from types import TracebackType

import numpy as np
import numpy.typing as npt

from prefixcache.address import Address, UnixAddress
from prefixcache.client.credentials import Bearer
from prefixcache.client.peer_connection import PeerConnection, PeerRefusedError
from prefixcache.client.results import ServerInfo
from prefixcache.rpc.peer_protocol import ARENA_ID, PeerMessage
from prefixcache.storage.shared_memory import create_shared_memory, map_shared_memory

DEFAULT_ARENA_BYTES = 256 * 2**20
"""As much as one message may have. Pages that no tensor was in take no memory."""
CAPABILITY = "arenas"
MIN_CALL_BYTES = 2**16
"""Of all tensors of a call: below that it is no faster by reference (measured)."""
ALIGNMENT = 64
"""Of tensors: a line of the CPU's cache."""
_AFTER_REFUSAL_S = 10.0
"""Until the daemon is asked again: others have as much as it takes."""
_AFTER_FAILURE_S = 1.0
"""The same if it did not answer: it may be starting."""


class Arenas:
    """One client's: at most one arena has new calls at a time.

    address: None for a channel of the caller's. num_bytes: of an arena; 0 for none.
    """

    def __init__(
        self,
        address: Address | None,
        num_bytes: int,
        bearer: Bearer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address if isinstance(address, UnixAddress) and num_bytes > 0 else None
        self._num_bytes = num_bytes
        self._bearer = bearer
        self._clock = clock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._arena: Arena | None = None
        self._try_at_s = 0.0

    def may_have(self, num_bytes: int, info: ServerInfo) -> bool:
        """Whether a region is worth asking for, for so many bytes."""
        return (
            self._address is not None
            and num_bytes >= MIN_CALL_BYTES
            and CAPABILITY in info.capabilities
            and self._clock() >= self._try_at_s
        )

    @property
    def is_ready(self) -> bool:
        """Whether there is an arena that the daemon knows."""
        arena = self._arena
        return arena is not None and arena.is_good

    def prepare(self, info: ServerInfo) -> None:
        """Make an arena if there is no good one. Waits for the daemon, for seconds at most."""
        with self._lock:
            if self.is_ready or self._address is None or self._clock() < self._try_at_s:
                return
            if self._arena is not None:
                self._arena.give_up()
                self._arena = None
            num_bytes = min(self._num_bytes, info.max_arena_bytes)
            try:
                self._arena = register(self._address, num_bytes, self._bearer.fresh_token())
            except PeerRefusedError:
                self._try_at_s = self._clock() + _AFTER_REFUSAL_S
            except OSError:
                self._try_at_s = self._clock() + _AFTER_FAILURE_S

    def region(self, num_bytes: int) -> Region | None:
        """A place for so many bytes, for a `with`; None if there is none now. Does not wait."""
        arena = self._arena
        return arena.region(num_bytes) if arena is not None else None

    def close(self) -> None:
        """In a forked child nothing happens: the lock may be held for ever."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._arena is not None:
                self._arena.give_up()
            self._arena = self._address = None


def register(address: UnixAddress, num_bytes: int, token: str) -> Arena:
    """Make memory and let the daemon map it too. Raises OSError; refused is one.

    token: what the client's calls carry; empty for none.
    """
    fd = create_shared_memory("prefixcache-arena", num_bytes)
    try:
        memory = map_shared_memory(fd, num_bytes, writable=True, populate=False)
        connection = PeerConnection(address)
        try:
            answer = connection.ask(PeerMessage.ARENA, token.encode(), [fd]).rest
            if len(answer) != ARENA_ID.size:
                raise ConnectionAbortedError("what answers is no daemon")
        except OSError:
            connection.close()
            raise
    finally:
        os.close(fd)
    return Arena(ARENA_ID.unpack(answer)[0], memory, connection)


class Arena:
    """One that the daemon knows by `arena_id`. Safe to use from many threads."""

    def __init__(self, arena_id: int, memory: Array[c_uint8], connection: PeerConnection) -> None:
        self.arena_id = arena_id
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
        self._connection = connection
        self._lock = threading.Lock()
        self._free = [(0, len(memory))]
        """Runs of free bytes, from start to end, in order; no two of them touch."""
        self._num_regions = 0
        self._is_given_up = False

    @property
    def is_good(self) -> bool:
        """Whether new calls may use it; no more after the daemon's end."""
        return not self._is_given_up and self._connection.is_open

    def region(self, num_bytes: int) -> Region | None:
        """The first place that is large enough: so as few pages as can be are ever used."""
        num_bytes = aligned(num_bytes)
        with self._lock:
            if self._is_given_up:
                return None
            for position, (start, end) in enumerate(self._free):
                if start + num_bytes <= end:
                    self._free[position : position + 1] = (
                        [(start + num_bytes, end)] if start + num_bytes < end else []
                    )
                    self._num_regions += 1
                    return Region(self, start, num_bytes)
        return None

    def give_up(self) -> None:
        """No more regions; the daemon is told once those in use are given back."""
        with self._lock:
            self._is_given_up = True
            self._close_if_unused()

    def give_back(self, start: int, num_bytes: int) -> None:
        with self._lock:
            insort(self._free, (start, start + num_bytes))
            self._free = _joined(self._free)
            self._num_regions -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_given_up and self._num_regions == 0:
            self._connection.close()


class Region:
    """A part of an arena, for one call. A `with` that ends by an exception gives the arena up."""

    def __init__(self, arena: Arena, start: int, num_bytes: int) -> None:
        self._arena, self._start, self._num_bytes = arena, start, num_bytes
        self._next = start

    @property
    def arena_id(self) -> int:
        return self._arena.arena_id

    def take(self, num_bytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """The next so many bytes: where they begin in the arena, and a view of them."""
        offset = self._next
        self._next += aligned(num_bytes)
        assert self._next <= self._start + self._num_bytes
        return offset, self._arena.memory[offset : offset + num_bytes]

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._arena.give_up()
        self._arena.give_back(self._start, self._num_bytes)


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes of a region."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs that touch become one; in order."""
    joined = runs[:1]
    for start, end in runs[1:]:
        if joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
