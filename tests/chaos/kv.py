"""K/V that follow from the tokens, so that a block of other tokens shows: written, and read back.

Two forms of one contract: in the daemon, through Prefill and Decode, and in memory that all clients
of a daemon without storage share, as engines' own. `compute` writes what is missing of a sequence
and then looks at everything that it may use, hits included.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from prefixcache import BlockCopy, Sequence
from prefixcache.storage.layout import KVLayout
from tests.chaos.daemon_process import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_LAYERS,
)
from tests.support.tolerances import is_close
from tests.support.toy_model import ToyModel

_STATE_MODULUS = 2**61 - 1
_NUM_BOOTS = 4096


@dataclass(eq=False)
class Held:
    """A sequence and what its K/V follow from.

    keys: the namespace and the extra keys, by numbers. written_from: K/V of tokens before
    it are in shared blocks and are never written, though the last of them is computed again.
    """

    sequence: Sequence
    tokens: list[int]
    keys: tuple[int, int]
    boot_id: bytes
    written_from: int = 0
    generation: int = 0
    lookahead: int = 0
    drafts: list[int] = field(default_factory=list)

    def chain(self, num_tokens: int | None = None) -> list[int]:
        tokens = [*self.tokens, *self.drafts][:num_tokens]
        namespace, salt = self.keys
        return [token + 10_000 * salt + 100_000 * namespace for token in tokens]

    @property
    def num_to_compute(self) -> int:
        """Rejected drafts may have been computed beyond the tokens."""
        return max(0, len(self.tokens) - self.sequence.num_computed_tokens)


class KvStore(Protocol):
    """Returns of `compute`: whether all K/V that were read are right."""

    def compute(self, held: Held, count: int, rng: random.Random) -> bool: ...

    def copy(self, held: Held, copies: Rows[BlockCopy]) -> None: ...


class DaemonKv:
    """The daemon's own memory, looked at through its attention."""

    def __init__(self) -> None:
        layout = KVLayout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, "float32")
        self._model = ToyModel(layout, num_query_heads=2)

    def compute(self, held: Held, count: int, rng: random.Random) -> bool:
        """The next `count` tokens through all layers, drafts included."""
        right = True
        end = held.sequence.num_computed_tokens + count
        for layer in range(NUM_LAYERS):
            start = held.sequence._state.position(layer)
            if start < end:
                right &= self._attend(held, layer, start, end, rng)
        return right

    def copy(self, held: Held, copies: Rows[BlockCopy]) -> None:
        """The daemon has."""

    def _attend(self, held: Held, layer: int, start: int, end: int, rng: random.Random) -> bool:
        chain, model = held.chain(end), self._model
        attend = held.sequence.prefill if rng.random() < 0.5 else held.sequence.decode
        out: Any = attend(
            layer, *(part(layer, chain, start) for part in (model.q, model.k, model.v))
        )
        return bool(torch.isfinite(out).all()) and is_close(out, model.exact(layer, chain, start))


class EngineKv:
    """One number a slot: the state of the whole chain up to its token.

    Each boot of the daemon has memory of its own: a client that has not heard of a restart yet
    writes into blocks that the new daemon has given to others.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._boots = np.memmap(
            path, np.uint64, "w+" if create else "r+", shape=(_NUM_BOOTS, NUM_BLOCKS, BLOCK_SIZE)
        )

    def compute(self, held: Held, count: int, rng: random.Random) -> bool:
        sequence, size, slots = held.sequence, BLOCK_SIZE, self._slots(held)
        start = sequence.num_computed_tokens
        end = min(start + count, len(held.tokens))
        expected = chain_states(held.chain(end))
        table = sequence.block_ids
        for position in range(max(start, held.written_from), end):
            slots[table[position // size], position % size] = expected[position]
        positions = np.arange(end)
        found = slots[table[positions // size], positions % size]
        right = found.tolist() == expected
        sequence.commit(end - start)
        return right

    def copy(self, held: Held, copies: Rows[BlockCopy]) -> None:
        slots = self._slots(held)
        for copy in copies:
            slots[copy.destination] = slots[copy.source]

    def _slots(self, held: Held) -> Any:
        return self._boots[zlib.crc32(held.boot_id) % _NUM_BOOTS]


def chain_states(chain: list[int]) -> list[int]:
    """For each token a number that follows from it and all tokens before it."""
    state, states = 17, []
    for value in chain:
        state = (state * 1_000_003 + value + 1) % _STATE_MODULUS
        states.append(state)
    return states


def kv_store(storage: str, folder: Path, *, create: bool = False) -> KvStore:
    """storage: "cpu" or "none", as the daemon's."""
    return DaemonKv() if storage == "cpu" else EngineKv(folder / "engine.kv", create=create)
