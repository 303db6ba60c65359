"""Arenas: memory of clients that the daemon has mapped too, so that tensors need not be sent.

A client registers one on the peer socket, as a sealed file (memfd), and then says in calls where in
it a tensor is. An arena is known by a random number, to its tenant's calls only, for as long as the
connection lives that it came by. It stays mapped until the last call that uses it has ended: its
views hold it.

What a client writes there during a call spoils its own sequences and results, and nothing else: no
shape, no index and no length is read from an arena, elements are only computed with, and its size
cannot change.

Thread-safe.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection
from ctypes import Array, c_uint8
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from prefixcache.core.shares import Shares
from prefixcache.errors import ArenaLostError, InvalidArgumentError
from prefixcache.storage.shared_memory import check_sealed, map_shared_memory

_Key = tuple[str | int, int]
"""Tenant, or user where there are none, and number of an arena."""


@dataclass(frozen=True, slots=True)
class _Arena:
    tenant: str
    memory: Array[c_uint8]


class Arenas:
    """The arenas of a daemon.

    max_bytes: of one; max_total_bytes: of all; max_user_bytes: of one user of the host, where there
    are no tenants, who have their shares of all. 0 takes none.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int, max_user_bytes: int) -> None:
        self.max_bytes = min(max_bytes, max_total_bytes, max_user_bytes)
        self._max_total_bytes = max_total_bytes
        self._max_user_bytes = max_user_bytes
        self._lock = threading.Lock()
        self._by_id: dict[int, _Arena] = {}
        # By tenant, or user where there are none, and number.
        self._mapped: WeakValueDictionary[tuple[str | int, int], Array[c_uint8]] = (
            WeakValueDictionary()
        )

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """Mapped now, also by calls that have not ended in arenas that are gone."""
        with self._lock:
            return self._num_bytes()

    def add(self, fd: int, tenant: str, uid: int, sharing: Collection[str]) -> int:
        """Map a client's file; the descriptor may be closed then. Returns the arena's number.

        tenant: the client's; empty without access control. uid: its user's. sharing: the tenants
        that there are.

        Raises InvalidArgumentError for a file that is not fit or too large, or if there are too
        many already.
        """
        try:
            num_bytes = check_sealed(fd)
        except ValueError as error:
            raise InvalidArgumentError("arena", str(error)) from None
        if not 0 < num_bytes <= self.max_bytes:
            problem = f"has {num_bytes} bytes, must have 1 to {self.max_bytes}"
            raise InvalidArgumentError("arena", problem)
        holder = tenant or uid
        with self._lock:
            left = self._num_left(holder, sharing)
            if num_bytes > left:
                kind = "tenant" if tenant else "user"
                problem = f"has {num_bytes} bytes, and {max(left, 0)} are left to its {kind}"
                raise InvalidArgumentError("arena", problem)
            try:
                memory = map_shared_memory(fd, num_bytes, writable=True, populate=False)
            except OSError as error:
                raise InvalidArgumentError("arena", f"cannot be mapped: {error}") from None
            arena_id = secrets.randbits(64)
            self._mapped[holder, arena_id] = memory
            self._by_id[arena_id] = _Arena(tenant, memory)
        return arena_id

    def remove(self, arena_id: int) -> None:
        del self._by_id[arena_id]

    def bytes_at(
        self, arena_id: int, offset: int, num_bytes: int, tenant: str
    ) -> npt.NDArray[np.uint8]:
        """A view: `[num_bytes]`, which may be written to.

        Raises ArenaLostError if it is no arena of the tenant's, and ValueError, which says why, if
        it does not reach so far.
        """
        arena = self._by_id.get(arena_id)
        if arena is None or arena.tenant != tenant:
            raise ArenaLostError("it is none of the caller's")
        if offset + num_bytes > len(arena.memory):
            raise ValueError(f"ends at {offset + num_bytes}, the arena has {len(arena.memory)}")
        return np.frombuffer(memoryview(arena.memory), np.uint8)[offset : offset + num_bytes]

    def _num_bytes(self) -> int:
        return sum(map(len, self._mapped.values()))

    def _num_left(self, holder: str | int, sharing: Collection[str]) -> int:
        """Bytes that a tenant, or a user of a daemon without any, can still have."""
        shares = Shares(self._max_total_bytes)
        shares.share_among(sharing)
        num_own = 0
        for (other, _), memory in list(self._mapped.items()):
            shares.add(other, len(memory))
            num_own += len(memory) if other == holder else 0
        left = shares.num_left(holder)
        return left if isinstance(holder, str) else min(left, self._max_user_bytes - num_own)
