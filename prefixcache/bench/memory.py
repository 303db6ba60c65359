"""Bytes a block of a full pool, as the operating system counts them.

Each measurement is a process of its own (`python -m prefixcache.bench.memory`): it makes a pool,
fills every block with cached content, frees all sequences, and compares its resident memory with
that of before. That counts a core in Python and a compiled one alike.
"""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixcache.bench.block_manager import make_block_manager
from prefixcache.bench.measure import OnRound, summarize
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Row, Target
from prefixcache.core.form import FORM
from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.core.sequence import CommitRow
from prefixcache.core.sequences import Sequences
from prefixcache.types import NO_EXTRA_KEYS

_BLOCKS_A_PROMPT = 250
_WARM_UP_BLOCKS = 2_000


@dataclass(frozen=True, slots=True)
class MemorySettings:
    blocks: int = 200_000
    block_size: int = 16
    repeats: int = 3


def measure_memory(
    settings: MemorySettings, algorithms: Sequence[str], on_round: OnRound
) -> tuple[Row, ...]:
    """One row an algorithm, with the hits verified where the daemon verifies them by default."""
    samples: dict[str, list[float]] = {name: [] for name in algorithms}
    for repeat in range(settings.repeats):
        for name in algorithms:
            samples[name].append(_measure_in_child(settings, name))
        on_round((repeat + 1) / settings.repeats)
    limit = 250 if FORM == "python" else 100
    return tuple(
        Row(
            section="Memory of a full pool",
            name="bytes a block",
            summary=summarize(found),
            unit="bytes",
            labels={
                "algorithm": name,
                "blocks": settings.blocks,
                "verified_hits": "no" if HASH_ALGORITHMS[name].is_cryptographic else "yes",
            },
            target=Target(limit) if HASH_ALGORITHMS[name].is_cryptographic else None,
        )
        for name, found in samples.items()
    )


def _measure_in_child(settings: MemorySettings, algorithm: str) -> float:
    command = [sys.executable, "-m", "prefixcache.bench.memory"]
    command += [str(settings.blocks), str(settings.block_size), algorithm]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def bytes_a_block(num_blocks: int, block_size: int, algorithm: str) -> float:
    """Resident bytes that a full pool has added to this process, over its blocks."""
    _fill(_WARM_UP_BLOCKS, block_size, algorithm)
    before = _resident_bytes()
    filled = _fill(num_blocks, block_size, algorithm)
    after = _resident_bytes()
    assert filled.pool.num_cached == num_blocks
    return (after - before) / num_blocks


def _fill(num_blocks: int, block_size: int, algorithm: str) -> Sequences:
    sequences = make_block_manager(num_blocks, block_size, algorithm)
    owner = secrets.token_bytes(16)
    prompts = Prompts(_BLOCKS_A_PROMPT * block_size)
    for count in _parts(num_blocks, _BLOCKS_A_PROMPT):
        token_ids = prompts.next()[: count * block_size]
        reply = sequences.allocate(owner, "", sequences.prepare(token_ids, NO_EXTRA_KEYS))
        sequences.rows.commit(owner, [CommitRow(reply.sequence_id, 0, len(token_ids))])
        sequences.free(owner, [reply.sequence_id])
    return sequences


def _parts(total: int, most: int) -> Iterator[int]:
    for start in range(0, total, most):
        yield min(most, total - start)


def _resident_bytes() -> int:
    """Of this process, after what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(bytes_a_block(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
