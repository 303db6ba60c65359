"""`bench replay`: a request trace through the block manager, one request at a time.

Each request is looked up, allocated, committed and freed, in a pool that is empty at first; each
recipe in a round of its own. The prompts are made before the clock starts, which then runs for the
calls alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from prefixcache.bench.core import PEER
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds, summarize
from prefixcache.bench.report import Ratio, Report, Row, Target
from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.replay import InProcessTarget, Trace
from prefixcache.types import TokenIds

_ROUNDS = Rounds(fewest=3, most=20, budget_s=60.0)
_TARGETS = {"sha256_cbor": 1 / 15, "xxhash_cbor": 1 / 20}


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """blocks None: a pool that never evicts."""

    block_size: int = 16
    blocks: int | None = None
    algorithms: tuple[str, ...] = tuple(HASH_ALGORITHMS)
    rounds: Rounds = _ROUNDS


class Replayer(Protocol):
    """An empty cache that serves one request after the other."""

    def prepare(self, token_ids: TokenIds) -> Any:
        """A prompt as `serve` takes it."""

    def serve(self, prompt: Any) -> int:
        """Lookup, allocate, commit and free; returns the blocks that were cached."""


class OwnReplayer:
    """Our block manager."""

    def __init__(self, num_blocks: int, block_size: int, algorithm: str) -> None:
        self._target = InProcessTarget(num_blocks, block_size, algorithm)

    def prepare(self, token_ids: TokenIds) -> TokenIds:
        return token_ids

    def serve(self, prompt: TokenIds) -> int:
        admission = self._target.allocate(prompt)
        if admission.is_admitted:
            self._target.commit()
            self._target.free()
        return admission.num_hit_blocks


MakeReplayer = Callable[[int, int], Replayer]
"""Of a pool of so many blocks, of so many tokens."""


def bench_replay(
    trace: Trace,
    settings: ReplaySettings,
    progress: Progress,
    peers: dict[str, MakeReplayer] | None = None,
) -> Report:
    """peers: other block managers by their names."""
    start = time.perf_counter()
    facts = machine_facts()
    size = settings.block_size
    blocks = settings.blocks or trace.num_blocks_without_eviction(size)
    makers: dict[str, MakeReplayer] = {
        name: partial(_make_own, name) for name in settings.algorithms
    }
    makers |= peers or {}
    laps: Laps[str] = Laps()
    hits: dict[str, int] = {}
    run_rounds(
        [
            partial(_replay, trace, name, makers[name], (blocks, size), laps, hits)
            for name in makers
        ],
        settings.rounds,
        warmed_up=laps.clear,
        on_round=partial(progress, "replays"),
    )
    return Report(
        bench="replay",
        machine=facts,
        settings={**asdict(settings), "blocks": blocks, "trace_block": trace.trace_block},
        rows=tuple(_rows(trace, laps, hits, size)),
        seconds=time.perf_counter() - start,
    )


def _make_own(algorithm: str, num_blocks: int, block_size: int) -> Replayer:
    return OwnReplayer(num_blocks, block_size, algorithm)


def _replay(
    trace: Trace,
    name: str,
    make: MakeReplayer,
    pool: tuple[int, int],
    laps: Laps[str],
    hits: dict[str, int],
) -> None:
    """One replay; hits: blocks that were hit in all, by name."""
    replayer = make(*pool)
    seconds, num_hits = 0.0, 0
    for request in trace.requests:
        prompt = replayer.prepare(trace.token_ids(request))
        start = laps.now()
        num_hits += replayer.serve(prompt)
        seconds += laps.now() - start
    laps.add(name, seconds)
    hits[name] = num_hits


def _rows(trace: Trace, laps: Laps[str], hits: dict[str, int], block_size: int) -> Iterator[Row]:
    num_requests = len(trace.requests)
    num_blocks = sum(request.num_tokens // block_size for request in trace.requests)
    peer = next((laps.summary(name).median for name in laps if name.startswith(PEER)), None)
    for name in laps:
        summary = laps.summary(name)
        is_peer = name.startswith(PEER)
        ratios = () if peer is None or is_peer else (Ratio(PEER, summary.median / peer),)
        limit = None if is_peer else _TARGETS.get(name)
        labels = {"requests": num_requests, "query_blocks": num_blocks, "hit_blocks": hits[name]}
        yield Row(
            section="Whole replay: lookup, allocate, commit, free",
            name=name,
            summary=summary,
            labels=labels,
            ratios=ratios,
            target=Target(limit, of=PEER) if limit else None,
        )
    for section, count in (("Requests a second", num_requests), ("Blocks a second", num_blocks)):
        for name in laps:
            rates = summarize(_rates(laps.samples(name), count))
            yield Row(section=section, name=name, summary=rates, unit="per_s")


def _rates(seconds: Sequence[float], count: int) -> list[float]:
    return [count / each for each in seconds]
