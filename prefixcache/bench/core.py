"""`bench core`: the calls of the block manager, in process, with the daemon's own objects.

What is called is in `core_calls`; here are the sizes, the order, the ratios and the targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product

from prefixcache.bench.core_calls import (
    BATCH,
    BATCH_PROMPT,
    FLOOR,
    HASH_LOOKUP,
    MAKE_POOL,
    CacheUnderTest,
    DigestFloor,
    Key,
    PoolMaker,
)
from prefixcache.bench.growth import GrowthSettings, measure_growth
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Candidate, Laps, Progress, Rounds, run_rounds
from prefixcache.bench.memory import MemorySettings, measure_memory
from prefixcache.bench.report import Ratio, Report, Row, Target
from prefixcache.core.form import FORM
from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.errors import InvalidArgumentError

_ROUNDS = Rounds(fewest=5, most=60, budget_s=60.0)
_LONG_PROMPT = 131_072


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What `bench core` measures. Every pool holds two of each prompt, and the batch."""

    tokens: tuple[int, ...] = (2_000, _LONG_PROMPT)
    blocks: tuple[int, ...] = (20_000, 200_000, 1_000_000)
    algorithms: tuple[str, ...] = tuple(HASH_ALGORITHMS)
    block_size: int = 16
    rounds: Rounds = _ROUNDS
    growth: GrowthSettings = field(default_factory=GrowthSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)

    @property
    def smallest_pool(self) -> int:
        batch = BATCH * -(-(2 * BATCH_PROMPT) // self.block_size)
        return batch + sum(2 * -(-tokens // self.block_size) for tokens in self.tokens)


def quick_settings() -> CoreSettings:
    """Small sizes and few rounds."""
    few = Rounds.exactly(3)
    return CoreSettings(
        tokens=(2_000,),
        blocks=(20_000,),
        rounds=few,
        growth=GrowthSettings(blocks=(2_000, 20_000), live=(10, 200), rounds=few),
        memory=MemorySettings(blocks=20_000, repeats=1),
    )


def with_rounds(settings: CoreSettings, count: int) -> CoreSettings:
    exactly = Rounds.exactly(count)
    growth = replace(settings.growth, rounds=exactly)
    return replace(settings, rounds=exactly, growth=growth)


PeerCandidates = Callable[[CoreSettings, Laps[Key]], list[Candidate]]
"""Somebody else's block manager in the same rounds. It records the same calls, under an algorithm
that is the peer's name and a recipe: `vllm sha256_cbor`.
"""
PEER = "vllm"


def bench_core(
    settings: CoreSettings, progress: Progress, peer: PeerCandidates | None = None
) -> Report:
    """Measure everything. Raises InvalidArgumentError for pools that hold too little."""
    if min(settings.blocks) < settings.smallest_pool:
        raise InvalidArgumentError(
            "--blocks",
            f"{min(settings.blocks)} is too small a pool for these prompts, which need "
            f"{settings.smallest_pool}",
        )
    start = time.perf_counter()
    facts = machine_facts()
    laps: Laps[Key] = Laps()
    size, lengths = settings.block_size, settings.tokens
    candidates = [
        *(DigestFloor(size, name, lengths, laps).round for name in settings.algorithms),
        *(PoolMaker(blocks, size, laps).round for blocks in settings.blocks),
        *(
            CacheUnderTest(blocks, size, name, lengths, laps).round
            for blocks, name in product(settings.blocks, settings.algorithms)
        ),
        *(peer(settings, laps) if peer else ()),
    ]
    done = run_rounds(
        candidates, settings.rounds, warmed_up=laps.clear, on_round=partial(progress, "calls")
    )
    del candidates
    memory = measure_memory(settings.memory, settings.algorithms, partial(progress, "memory"))
    growth = measure_growth(settings.growth, settings.block_size, progress)
    return Report(
        bench="core",
        machine=facts,
        settings={**asdict(settings), "rounds_done": done},
        rows=(*_rows(laps), *memory, *growth),
        seconds=time.perf_counter() - start,
    )


def _rows(laps: Laps[Key]) -> Iterator[Row]:
    """Grouped by section: hashing, making pools, then each pool size."""
    keys = [key for key in laps if key.call != FLOOR]
    for key in sorted(keys, key=lambda key: (key.blocks or 0, key.call != MAKE_POOL)):
        yield Row(
            section=_section(key),
            name=key.call,
            summary=laps.summary(key),
            labels=key.labels,
            ratios=tuple(_ratios(laps, key)),
            target=_target(key),
        )


def _section(key: Key) -> str:
    if key.blocks is None:
        return "Hashing a prompt"
    return "Making a pool" if key.call == MAKE_POOL else f"Pool of {key.blocks:,} blocks"


def _ratios(laps: Laps[Key], key: Key) -> Iterator[Ratio]:
    if key.algorithm.startswith(PEER):
        return
    # The peer has no recipe like xxh3, whose digest is xxhash_cbor's.
    recipe = "xxhash_cbor" if key.algorithm == "xxh3" else key.algorithm
    peer = replace(key, algorithm=f"{PEER} {recipe}".strip())
    for of, other in ((FLOOR, replace(key, call=FLOOR)), (PEER, peer)):
        if other in laps and (of == PEER or key.call == "hash"):
            yield Ratio(of, laps.summary(key).median / laps.summary(other).median)


def _target(key: Key) -> Target | None:
    if key == Key(MAKE_POOL, blocks=1_000_000):
        return Target(0.1)
    if key.algorithm != "sha256_cbor":
        return None
    if key.call == "append, 1 token a row" and key.rows == BATCH:
        return Target(50e-6)
    if key.call == HASH_LOOKUP and key.tokens == _LONG_PROMPT:
        return Target(1 / 2.5 if FORM == "python" else 1 / 20, of=PEER)
    return None
