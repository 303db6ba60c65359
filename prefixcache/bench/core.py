"""`bench core`: the calls of the block manager, in process, with the daemon's own objects.

One pool for each recipe and size. In each round it serves a prompt that is cached whole and a new
one of each length (small pools evict for it), and a batch of sequences that decode. The floor of
hashing is one digest over all the bytes that the chain of the prompt hashes, which leaves out that
each block waits for the one before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import cbor2
import numpy as np

from prefixcache.bench.block_manager import make_block_manager
from prefixcache.bench.growth import GrowthSettings, measure_growth
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Candidate, Laps, Progress, Rounds, run_rounds
from prefixcache.bench.memory import MemorySettings, measure_memory
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Report, Row, Target
from prefixcache.core.form import FORM
from prefixcache.core.hashing import HASH_ALGORITHMS, HashAlgorithm
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.errors import InvalidArgumentError
from prefixcache.types import NO_EXTRA_KEYS, FullHit, ResultCode, TokenIds

_ROUNDS = Rounds(fewest=5, most=60, budget_s=60.0)
BATCH = 64
"""Sequences of the batch that decodes."""
_BATCH_PROMPT = 256
_BATCH_STEPS = 16  # one new block each
_FLOOR = "one digest"
_ONE_TOKEN = np.array([7], dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What `bench core` measures. Every pool holds two of each prompt, and the batch."""

    tokens: tuple[int, ...] = (2_000, 131_072)
    blocks: tuple[int, ...] = (20_000, 200_000, 1_000_000)
    algorithms: tuple[str, ...] = tuple(HASH_ALGORITHMS)
    block_size: int = 16
    rounds: Rounds = _ROUNDS
    growth: GrowthSettings = field(default_factory=GrowthSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)

    @property
    def smallest_pool(self) -> int:
        batch = BATCH * -(-(2 * _BATCH_PROMPT) // self.block_size)
        return batch + sum(2 * -(-tokens // self.block_size) for tokens in self.tokens)


@dataclass(frozen=True, slots=True)
class Key:
    """One measured call; None and empty where it plays no part."""

    call: str
    algorithm: str = ""
    blocks: int | None = None
    tokens: int | None = None
    rows: int | None = None

    @property
    def labels(self) -> dict[str, str | int]:
        return {
            name: value
            for name in ("algorithm", "blocks", "tokens", "rows")
            if (value := getattr(self, name))
        }


PeerCandidates = Callable[[CoreSettings, Laps[Key]], list[Candidate]]
"""Somebody else's block manager in the same rounds. It records the same calls, under an algorithm
that is the peer's name and a recipe: `vllm sha256_cbor`.
"""


@dataclass(slots=True)
class Grower:
    """A sequence that decodes."""

    sequence_id: int
    num_tokens: int


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
    candidates = [
        *(DigestFloor(name, settings, laps).round for name in settings.algorithms),
        *(PoolMaker(blocks, settings.block_size, laps).round for blocks in settings.blocks),
        *(
            CacheUnderTest(blocks, name, settings, laps).round
            for blocks in settings.blocks
            for name in settings.algorithms
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


class CacheUnderTest:
    """One pool with one recipe, and a round of calls on it."""

    def __init__(
        self, num_blocks: int, algorithm: str, settings: CoreSettings, laps: Laps[Key]
    ) -> None:
        self._sequences = make_block_manager(num_blocks, settings.block_size, algorithm)
        self._num_blocks, self._algorithm, self._laps = num_blocks, algorithm, laps
        self._owner = secrets.token_bytes(16)
        self._prompts = {tokens: Prompts(tokens, seed=tokens) for tokens in settings.tokens}
        self._cached = {tokens: found.next() for tokens, found in self._prompts.items()}
        for token_ids in self._cached.values():
            self._compute(token_ids)
        self._batch_prompts = Prompts(_BATCH_PROMPT)

    def round(self) -> None:
        for tokens, prompts in self._prompts.items():
            self._cached_prompt(tokens)
            self._new_prompt(tokens, prompts.next())
        self._decode()

    def _cached_prompt(self, tokens: int) -> None:
        sequences, token_ids = self._sequences, self._cached[tokens]
        hash_key = Key("hash", self._algorithm, tokens=tokens)
        lookup_key = self._key("lookup", tokens)
        prompt = self._laps.time(hash_key, lambda: sequences.prepare(token_ids, NO_EXTRA_KEYS))
        found = self._laps.time(lookup_key, lambda: sequences.lookup(prompt, 0, FullHit.LAST_TOKEN))
        assert found.num_cached_blocks == tokens // sequences.pool.block_size
        both = self._laps.samples(hash_key)[-1] + self._laps.samples(lookup_key)[-1]
        self._laps.add(self._key("hash + lookup", tokens), both)
        reply = self._laps.time(
            self._key("allocate, cached", tokens),
            lambda: sequences.allocate(self._owner, "", prompt),
        )
        self._free(tokens, [reply.sequence_id])

    def _new_prompt(self, tokens: int, token_ids: TokenIds) -> None:
        sequences = self._sequences
        prompt = sequences.prepare(token_ids, NO_EXTRA_KEYS)
        reply = self._laps.time(
            self._key("allocate, new", tokens),
            lambda: sequences.allocate(self._owner, "", prompt),
        )
        row = CommitRow(reply.sequence_id, 0, tokens)
        self._laps.time(self._key("commit", tokens), lambda: sequences.commit(self._owner, [row]))
        self._free(tokens, [reply.sequence_id])

    def _decode(self) -> None:
        # Of different lengths, so that in each step some of them begin a block.
        size = self._sequences.pool.block_size
        prompts = [self._batch_prompts.next()[: _BATCH_PROMPT - row % size] for row in range(BATCH)]
        batch = [Grower(self._compute(prompt, keep=True), len(prompt)) for prompt in prompts]
        for _ in range(_BATCH_STEPS):
            self._step(batch)
            self._step(batch[:1])
        self._sequences.free(self._owner, [grower.sequence_id for grower in batch])

    def _step(self, batch: list[Grower]) -> None:
        """Append a token to each, and commit it."""
        sequences, owner, count = self._sequences, self._owner, len(batch)
        rows = [AppendRow(one.sequence_id, one.num_tokens, _ONE_TOKEN) for one in batch]
        commits = [CommitRow(one.sequence_id, one.num_tokens, 1) for one in batch]
        replies = self._laps.time(
            self._key("append, 1 token a row", rows=count), lambda: sequences.append(owner, rows)
        )
        assert all(reply.code is ResultCode.OK for reply in replies)
        self._laps.time(
            self._key("commit, 1 token a row", rows=count), lambda: sequences.commit(owner, commits)
        )
        for one in batch:
            one.num_tokens += 1

    def _compute(self, token_ids: TokenIds, *, keep: bool = False) -> int:
        """Allocate and commit; the sequence's id."""
        sequences = self._sequences
        reply = sequences.allocate(self._owner, "", sequences.prepare(token_ids, NO_EXTRA_KEYS))
        first = reply.num_cached_tokens
        sequences.commit(self._owner, [CommitRow(reply.sequence_id, first, len(token_ids) - first)])
        if not keep:
            sequences.free(self._owner, [reply.sequence_id])
        return reply.sequence_id

    def _free(self, tokens: int, sequence_ids: list[int]) -> None:
        self._laps.time(
            self._key("free", tokens), lambda: self._sequences.free(self._owner, sequence_ids)
        )

    def _key(self, call: str, tokens: int | None = None, rows: int | None = None) -> Key:
        return Key(call, self._algorithm, self._num_blocks, tokens, rows)


class DigestFloor:
    """One digest over all the bytes that the chain of a prompt hashes."""

    def __init__(self, algorithm: str, settings: CoreSettings, laps: Laps[Key]) -> None:
        self._recipe, self._laps = HASH_ALGORITHMS[algorithm], laps
        self._bytes = {
            tokens: chain_bytes(self._recipe, Prompts(tokens).next(), settings.block_size)
            for tokens in settings.tokens
        }

    def round(self) -> None:
        for tokens, data in self._bytes.items():
            key = Key(_FLOOR, self._recipe.name, tokens=tokens)
            self._laps.time(key, partial(self._recipe.digest, data))


def chain_bytes(recipe: HashAlgorithm, token_ids: TokenIds, block_size: int) -> bytes:
    """What the digest of a recipe is given for the full blocks of a prompt, one after the other."""
    parent = bytes(recipe.digest_bytes)
    end = len(token_ids) // block_size * block_size
    blocks = token_ids[:end].reshape(-1, block_size)
    if not recipe.uses_cbor:
        return b"".join(parent + block.astype("<u4").tobytes() for block in blocks)
    return b"".join(
        cbor2.dumps([parent, tokens, None], canonical=True) for tokens in blocks.tolist()
    )


class PoolMaker:
    """Making an empty pool."""

    def __init__(self, num_blocks: int, block_size: int, laps: Laps[Key]) -> None:
        self._num_blocks, self._block_size, self._laps = num_blocks, block_size, laps

    def round(self) -> None:
        self._laps.time(
            Key("make a pool", blocks=self._num_blocks),
            lambda: Pool(self._num_blocks, self._block_size, False),
        )


def _rows(laps: Laps[Key]) -> Iterator[Row]:
    """Grouped by section: hashing, making pools, then each pool size."""
    keys = [key for key in laps if key.call != _FLOOR]
    for key in sorted(keys, key=lambda key: (key.blocks or 0, key.algorithm != "")):
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
    return "Making a pool" if not key.algorithm else f"Pool of {key.blocks:,} blocks"


def _ratios(laps: Laps[Key], key: Key) -> Iterator[Ratio]:
    others = {_FLOOR: replace(key, call=_FLOOR, blocks=None)}
    name = "xxhash_cbor" if key.algorithm == "xxh3" else key.algorithm
    others["vllm"] = replace(key, algorithm=f"vllm {name}".strip())
    for of, other in others.items():
        if other in laps and (of != _FLOOR or key.call == "hash"):
            yield Ratio(of, laps.summary(key).median / laps.summary(other).median)


def _target(key: Key) -> Target | None:
    if key == Key("make a pool", blocks=1_000_000):
        return Target(0.1)
    if key.call.startswith("append") and key.rows == BATCH and key.algorithm == "sha256_cbor":
        return Target(50e-6)
    if key.call == "hash + lookup" and key.algorithm == "sha256_cbor":
        return Target(1 / 2.5 if FORM == "python" else 1 / 20, of="vllm")
    return None
