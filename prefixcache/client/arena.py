"""Memory that a client shares with its daemon, so that large tensors are copied and not sent.

Only on a Unix socket, with a daemon that has the capability "arenas". Tensors are copied into a
region of the arena, the call says where they are, and the result is copied out of it: it is the
caller's own, so nothing that the caller keeps holds up a region, and a forked child, which has
nothing of the arena, has the result. Tensors that lie in the arena, because the caller had their
memory from `Arenas.lend`, stay where they are.

Only a reply tells that the daemon is done with a region. After a call that failed, or was given up,
the whole arena is given up: its other calls end in it, later ones get another. So the daemon never
reads or writes a region that is another call's by then. Where the failed call's tensors lay in lent
memory, that becomes a private copy, in place, before the caller hears of the failure: what the
caller does next is not seen by the daemon, which may still be reading K/V, and what the daemon
still writes is not seen by the caller. All that was lent of it is memory like other memory then.

`Arenas` may be used by many threads.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_uint8
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.address import Address, UnixAddress
from prefixcache.client.credentials import Bearer
from prefixcache.client.peer_connection import PeerConnection, PeerRefusedError
from prefixcache.client.results import ServerInfo
from prefixcache.rpc.peer_protocol import ARENA_ID, PeerMessage
from prefixcache.storage.shared_memory import create_shared_memory, make_private, map_shared_memory

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

    def may_have_one(self, info: ServerInfo) -> bool:
        """Whether it is worth asking the daemon for one."""
        return (
            self._address is not None
            and CAPABILITY in info.capabilities
            and self._clock() >= self._try_at_s
        )

    @property
    def ready(self) -> Arena | None:
        """The arena, if there is one that the daemon knows."""
        arena = self._arena
        return arena if arena is not None and arena.is_good else None

    def prepare(self, info: ServerInfo) -> Arena | None:
        """Make an arena if none is ready. Waits for the daemon, for seconds at most."""
        with self._lock:
            ready = self.ready
            if ready is not None or self._address is None or self._clock() < self._try_at_s:
                return ready
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
            return self._arena

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
        self.memory: npt.NDArray[np.uint8] = _bytes_of(memory)
        self._mapped = memory
        self._address = addressof(memory)
        self._connection = connection
        self._lock = threading.Lock()
        self._free = [(0, len(memory))]
        """Runs of free bytes, from start to end, in order; no two of them touch."""
        self._num_calls = 0
        self._is_given_up = False
        self._returned: deque[tuple[int, int]] = deque()
        """Lent runs that were given back by one who could not wait for the lock."""
        self._lent: set[tuple[int, int]] = set()

    @property
    def is_good(self) -> bool:
        """Whether new calls may use it; no more after the daemon's end."""
        return not self._is_given_up and self._connection.is_open

    def region(self, num_bytes: int, offsets: Sequence[int | None] = ()) -> Region | None:
        """A place for a call's tensors, for a `with`; None if there is none now. Does not wait.

        offsets: where in the arena each of the tensors lies already, and None for the others.
        """
        num_bytes = aligned(num_bytes)
        with self._lock:
            start = self._take(num_bytes, ALIGNMENT)
            if start is None:
                return None
            self._num_calls += 1
        return Region(self, start, num_bytes, offsets)

    def lend(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Memory of the arena, at least 1 byte; None if there is none now.

        It is given back when the array, its views, and tensors made of it are gone.
        """
        # Whole pages, which `make_private` needs.
        num_taken = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            start = self._take(num_taken, mmap.PAGESIZE)
            if start is None:
                return None
            run = start, start + num_taken
            self._lent.add(run)
        # An object of its own, which all views refer to. It may go in a thread that has the lock.
        lent = (c_uint8 * num_bytes).from_buffer(self._mapped, start)
        weakref.finalize(lent, self._returned.append, run).atexit = False
        return _bytes_of(lent)

    def offset_of(self, array: npt.NDArray[Any]) -> int | None:
        """Where in the arena an array lies; None if it does not, or not in one piece."""
        offset: int = array.__array_interface__["data"][0] - self._address
        is_there = offset >= 0 and offset + array.nbytes <= len(self._mapped) and array.nbytes > 0
        return offset if is_there and array.flags.c_contiguous else None

    def give_up(self, offsets: Sequence[int] = ()) -> None:
        """No more regions; the daemon is told once no call uses it.

        offsets: where tensors of a call that failed lie in lent memory. Raises OSError if there is
        no memory for a private copy.
        """
        with self._lock:
            self._is_given_up = True
            self._close_if_unused()
            runs = {run for run in self._lent for at in offsets if run[0] <= at < run[1]}
        for start, end in runs:
            make_private(self._address + start, end - start)

    def end_call(self, start: int, num_bytes: int) -> None:
        """Give a region back."""
        with self._lock:
            self._put_back(start, start + num_bytes)
            self._num_calls -= 1
            self._close_if_unused()

    def _take(self, num_bytes: int, alignment: int) -> int | None:
        """The first place that is large enough: so as few pages as can be are ever used."""
        if self._is_given_up:
            return None
        while self._returned:
            run = self._returned.popleft()
            self._lent.discard(run)
            self._put_back(*run)
        for position, (first, end) in enumerate(self._free):
            start = -(-first // alignment) * alignment
            if start + num_bytes <= end:
                left = (first, start), (start + num_bytes, end)
                self._free[position : position + 1] = [run for run in left if run[0] < run[1]]
                return start
        return None if num_bytes else 0

    def _put_back(self, start: int, end: int) -> None:
        if start < end:
            insort(self._free, (start, end))
            self._free = _joined(self._free)

    def _close_if_unused(self) -> None:
        if self._is_given_up and self._num_calls == 0:
            self._connection.close()


class Region:
    """A part of an arena, for one call. A `with` that ends by an exception gives the arena up.

    offsets: of the call's tensors, see `Arena.region`.
    """

    def __init__(
        self, arena: Arena, start: int, num_bytes: int, offsets: Sequence[int | None]
    ) -> None:
        self._arena, self._start, self._num_bytes = arena, start, num_bytes
        self._next = start
        self.offsets = offsets

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
        try:
            if error is not None:
                self._arena.give_up([offset for offset in self.offsets if offset is not None])
        finally:
            self._arena.end_call(self._start, self._num_bytes)


def lent_or_new(arena: Arena | None, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of the arena if it has room, else other memory."""
    lent = arena.lend(num_bytes) if arena is not None else None
    return np.empty(num_bytes, np.uint8) if lent is None else lent


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes of a region."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _bytes_of(memory: Array[c_uint8]) -> npt.NDArray[np.uint8]:
    """A view, which holds the memory."""
    return np.frombuffer(memoryview(memory), np.uint8)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs that touch become one; in order."""
    joined = runs[:1]
    for start, end in runs[1:]:
        if joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
