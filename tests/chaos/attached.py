"""A client process with the daemon's memory mapped, whose threads write K/V into it all the time.

K/V follow from the tokens, as everywhere here, but what stands in a block before it is committed is
junk, written again and again: so a write that comes too late, in a block that is another's by then,
is seen. A writer is honest: it asks whether its session lives before it writes and after it has
read, and writes only to blocks of its sequences that it has not committed.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache import Client, Sequence, errors
from prefixcache.attached import attach
from prefixcache.attached.pool_view import PoolView
from tests.chaos.clients import World
from tests.chaos.daemon_process import BLOCK_SIZE, NUM_LAYERS
from tests.chaos.kv import chain_states
from tests.chaos.tally import ClientTally

_NUM_THREADS = 3
_MAX_HELD = 2
_TRUNKS = [[100 * trunk + token for token in range(16)] for trunk in range(4)]
_PASSES = (1, 300)
"""Of junk, over all that a thread computes at once: up to some 20 ms without a look at anything."""
_MODULUS = 2**24
"""Numbers below it are exact in float32."""


def write_without_end(
    world: World, row: int, seed: int, ttl_s: float, comes_back: bool
) -> list[str]:
    """Until it is killed. comes_back: goes on with another session when its own is lost; if not,
    it waits for its end with the memory still mapped.
    """
    tally = world.tally().of_row(row)
    with Client(world.target, client_name=f"writer {row}", session_ttl_s=ttl_s) as client:
        while True:
            with attach(client) as view:
                problems = _write(client, view, seed, tally)
                if problems:
                    return problems
                if not comes_back:
                    threading.Event().wait()


def _write(client: Client, view: PoolView, seed: int, tally: ClientTally) -> list[str]:
    """All threads, until the session is lost; what is wrong."""
    writers = [_Writer(client, view, seed + number, tally) for number in range(_NUM_THREADS)]
    threads = [threading.Thread(target=writer.run) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [problem for writer in writers for problem in writer.problems]


class _Writer:
    """One thread, and its sequences with their tokens."""

    def __init__(self, client: Client, view: PoolView, seed: int, tally: ClientTally) -> None:
        self.problems: list[str] = []
        self._client, self._view, self._tally = client, view, tally
        self._rng = random.Random(seed)
        caches = [view.layer(layer) for layer in range(NUM_LAYERS)]
        self._parts = [part.numpy() for cache in caches for part in (cache.keys, cache.values)]
        self._held: list[tuple[Sequence, list[int]]] = []

    def run(self) -> None:
        try:
            while not self.problems:
                self._turn()
        except errors.SessionLostError:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            self.problems.append(repr(error))

    def _turn(self) -> None:
        rng = self._rng
        try:
            if not self._held or rng.random() < 0.5:
                self._allocate()
            else:
                self._append(*rng.choice(self._held))
        except errors.NoRoomError:
            self._free(len(self._held))
        if len(self._held) > _MAX_HELD or rng.random() < 0.2:
            self._free(1)

    def _allocate(self) -> None:
        rng = self._rng
        tail = [rng.randrange(1000, 1_000_000) for _ in range(rng.randrange(1, 9))]
        tokens = rng.choice(_TRUNKS)[: rng.randrange(17)] + tail
        sequence = self._client.sequence(tokens, num_lookahead_tokens=rng.choice((0, 0, 3)))
        self._held.append((sequence, tokens))
        self._compute(sequence, tokens)

    def _append(self, sequence: Sequence, tokens: list[int]) -> None:
        more = [self._rng.randrange(1000) for _ in range(self._rng.randrange(1, 7))]
        sequence.append(more)
        tokens += more
        self._compute(sequence, tokens)

    def _free(self, count: int) -> None:
        for sequence, _ in self._held[:count]:
            sequence.free()
        del self._held[:count]

    def _compute(self, sequence: Sequence, tokens: list[int]) -> None:
        """Write what is missing, look at everything, and commit what is new, if not all of it."""
        start, end = sequence.num_computed_tokens, len(tokens)
        expected = np.array(chain_states(tokens), dtype=np.int64)
        new = np.arange(max(start, sequence._state.first_writable), end)
        self._view.check()
        for number in range(self._rng.randint(*_PASSES)):
            self._put(sequence, new, np.full(len(new), -1 - number))
        self._put(sequence, new, expected[new])
        right = self._is_right(sequence, expected)
        self._view.check()
        self._tally.mark("checked")
        if not right:
            self._tally.mark("wrong")
        sequence.commit(self._rng.randint(0, end - start) if end > start else 0)
        self._tally.mark("steps")

    def _put(self, sequence: Sequence, positions: npt.NDArray[Any], values: Any) -> None:
        blocks, offsets = _slots(sequence, positions)
        for number, part in enumerate(self._parts):
            part[blocks, 0, offsets] = _of_part(values, number)[:, None]

    def _is_right(self, sequence: Sequence, expected: npt.NDArray[Any]) -> bool:
        blocks, offsets = _slots(sequence, np.arange(len(expected)))
        return all(
            bool((part[blocks, 0, offsets] == _of_part(expected, number)[:, None]).all())
            for number, part in enumerate(self._parts)
        )


def _slots(sequence: Sequence, positions: npt.NDArray[Any]) -> tuple[Any, Any]:
    return sequence.block_ids[positions // BLOCK_SIZE], positions % BLOCK_SIZE


def _of_part(values: npt.NDArray[Any], number: int) -> npt.NDArray[np.float32]:
    """K and V of each layer differ; junk stays junk."""
    found = np.where(values < 0, values, (values + 7919 * number) % _MODULUS)
    return found.astype(np.float32)
