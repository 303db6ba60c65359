"""Does a call cost more in a larger pool, or beside more live sequences?

The work stays the same: prompts of one length against pools that are full of cached prompts, so
that every new block evicts one; and a batch of sequences among more and more others: the same ones
in each round, or any, which the processor's caches then have not seen for long. Hashing, in which
pool and sequences play no part, is left out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from prefixcache.bench.block_manager import make_block_manager
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Row
from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow, CommitRow, Prompt
from prefixcache.types import NO_EXTRA_KEYS, FullHit

POOL_SECTION = "Growth with the size of the pool, a block"
LIVE_SECTION = "Growth with live sequences, a sequence"
_ALGORITHM = "sha256_cbor"
_ONE_TOKEN = np.array([7], dtype=np.uint32)
_BATCH = 10
_HEAD_BLOCKS = 16
_ROUNDS = Rounds(fewest=5, most=40, budget_s=10.0)


@dataclass(frozen=True, slots=True)
class GrowthSettings:
    """blocks, live: the sizes that are compared. prompt_blocks: length of a prompt.

    prompts: of each kind in a round.
    """

    blocks: tuple[int, ...] = (20_000, 63_000, 200_000, 630_000, 2_000_000)
    live: tuple[int, ...] = (10, 100, 1_000, 10_000)
    prompt_blocks: int = 128
    prompts: int = 10
    rounds: Rounds = _ROUNDS


@dataclass(frozen=True, slots=True)
class Key:
    call: str
    size: int


def measure_growth(
    settings: GrowthSettings, block_size: int, progress: Progress
) -> tuple[Row, ...]:
    """Rows of both sections. Their ratio is to the smallest size."""
    by_pool, by_live = Laps[Key](), Laps[Key]()
    pools = []
    for index, blocks in enumerate(settings.blocks, start=1):
        pools.append(FullPool(blocks, settings, block_size, by_pool))
        progress("filling pools", index / len(settings.blocks))
    crowds: list[Crowd | Fillers] = []
    for index, live in enumerate(settings.live, start=1):
        crowds += Crowd(live, block_size, by_live), Fillers(live, block_size, by_live)
        progress("making sequences", index / len(settings.live))
    run_rounds(
        [pool.round for pool in pools],
        settings.rounds,
        warmed_up=by_pool.clear,
        on_round=partial(progress, "growth by pool"),
    )
    run_rounds(
        [crowd.round for crowd in crowds],
        settings.rounds,
        warmed_up=by_live.clear,
        on_round=partial(progress, "growth by sequences"),
    )
    return (
        *_rows(POOL_SECTION, "blocks", by_pool, min(settings.blocks)),
        *_rows(LIVE_SECTION, "live_sequences", by_live, min(settings.live)),
    )


def _rows(section: str, label: str, laps: Laps[Key], smallest: int) -> list[Row]:
    keys = sorted(laps, key=lambda key: (key.call, key.size))
    return [
        Row(
            section=section,
            name=key.call,
            summary=(summary := laps.summary(key)),
            labels={label: key.size},
            ratios=(
                Ratio(
                    "the smallest", summary.median / laps.summary(Key(key.call, smallest)).median
                ),
            ),
        )
        for key in keys
    ]


class FullPool:
    """A pool full of cached prompts, numbered from 0 in the order in which they came."""

    def __init__(
        self, num_blocks: int, settings: GrowthSettings, block_size: int, laps: Laps[Key]
    ) -> None:
        self._laps, self._size = laps, num_blocks
        self._prompts_a_round, self._prompt_blocks = settings.prompts, settings.prompt_blocks
        self._sequences = make_block_manager(num_blocks, block_size, _ALGORITHM)
        self._owner = secrets.token_bytes(16)
        self._prompts = Prompts(settings.prompt_blocks * block_size)
        self._next = 0
        self._random = np.random.default_rng(num_blocks)
        while self._sequences.pool.num_blank:
            self._serve_new(self._new_prompt())

    def round(self) -> None:
        for prompt in self._recent_prompts():
            found = self._time("lookup", partial(self._lookup, prompt))
            assert found == self._prompt_blocks
            self._time("allocate + free, cached", partial(self._serve_cached, prompt))
        for _ in range(self._prompts_a_round):
            prompt = self._new_prompt()
            self._time(
                "allocate + commit + free, evicting",
                partial(self._serve_new, prompt),
            )

    def _time(self, call: str, work: Callable[[], int]) -> int:
        return self._laps.time_each(Key(call, self._size), self._prompt_blocks, work)

    def _recent_prompts(self) -> list[Prompt]:
        """Random ones of the half that came last, which no round evicts."""
        held = self._size // self._prompt_blocks
        ages = self._random.integers(0, max(1, held // 2), self._prompts_a_round)
        return [self._prompt(self._next - 1 - int(age)) for age in ages]

    def _new_prompt(self) -> Prompt:
        self._next += 1
        return self._prompt(self._next - 1)

    def _prompt(self, number: int) -> Prompt:
        return self._sequences.prepare(self._prompts.numbered(number), NO_EXTRA_KEYS)

    def _lookup(self, prompt: Prompt) -> int:
        return self._sequences.lookup(prompt, 0, FullHit.LAST_TOKEN).num_cached_blocks

    def _serve_cached(self, prompt: Prompt) -> int:
        reply = self._sequences.allocate(self._owner, "", prompt)
        self._sequences.free(self._owner, [reply.sequence_id])
        return reply.num_cached_tokens

    def _serve_new(self, prompt: Prompt) -> int:
        reply = self._sequences.allocate(self._owner, "", prompt)
        row = CommitRow(reply.sequence_id, 0, len(prompt.token_ids))
        self._sequences.rows.commit(self._owner, [row])
        self._sequences.free(self._owner, [reply.sequence_id])
        return reply.num_cached_tokens


class Crowd:
    """Many live sequences, of which a few decode at a time."""

    def __init__(self, live: int, block_size: int, laps: Laps[Key]) -> None:
        self._laps, self._live = laps, live
        # Room for what each sequence appends: a round is a few tokens of a few sequences.
        num_blocks = 8 * live + 10_000
        self._sequences = make_block_manager(num_blocks, block_size, _ALGORITHM)
        self._owner = secrets.token_bytes(16)
        self._prompts = Prompts(block_size)
        self._random = np.random.default_rng(live)
        self._lengths = {self._start(self._prepare()): block_size for _ in range(live)}
        self._ids = list(self._lengths)

    def round(self) -> None:
        count = min(_BATCH, self._live)
        self._step("append + commit, the same few", self._ids[:count])
        chosen = self._random.choice(self._live, count, replace=False)
        self._step("append + commit, any few", [self._ids[i] for i in chosen])
        prompts = [self._prepare() for _ in range(count)]
        key = Key("allocate + commit + free", self._live)
        self._laps.time_each(key, count, lambda: self._come_and_go(prompts))

    def _step(self, name: str, sequence_ids: list[int]) -> None:
        """Append a token to each, and commit it."""
        rows = [AppendRow(one, self._lengths[one], _ONE_TOKEN) for one in sequence_ids]
        appends = AppendBatch.of(rows)
        commits = [CommitRow(one, self._lengths[one], 1) for one in sequence_ids]
        key = Key(name, self._live)
        self._laps.time_each(key, len(sequence_ids), lambda: self._decode(appends, commits))
        for one in sequence_ids:
            self._lengths[one] += 1

    def _decode(self, appends: AppendBatch, commits: list[CommitRow]) -> None:
        self._sequences.rows.append(self._owner, appends)
        self._sequences.rows.commit(self._owner, commits)

    def _come_and_go(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            self._sequences.free(self._owner, [self._start(prompt)])

    def _prepare(self) -> Prompt:
        return self._sequences.prepare(self._prompts.next(), NO_EXTRA_KEYS)

    def _start(self, prompt: Prompt) -> int:
        reply = self._sequences.allocate(self._owner, "", prompt)
        row = CommitRow(reply.sequence_id, 0, len(prompt.token_ids))
        self._sequences.rows.commit(self._owner, [row])
        return reply.sequence_id


class Fillers:
    """Live sequences that compute their prompts, which have one head: all of it is pending."""

    def __init__(self, live: int, block_size: int, laps: Laps[Key]) -> None:
        self._laps, self._live = laps, live
        num_blocks = 2 * _HEAD_BLOCKS * (live + 1)
        self._sequences = make_block_manager(num_blocks, block_size, _ALGORITHM)
        self._owner = secrets.token_bytes(16)
        self._tails = Prompts(_HEAD_BLOCKS * block_size)
        self._head = self._tails.next()
        for _ in range(live):
            self._sequences.allocate(self._owner, "", self._prepare())

    def round(self) -> None:
        count = min(_BATCH, self._live)
        prompts = [self._prepare() for _ in range(count)]
        key = Key("allocate + free, among prompts that are computed", self._live)
        self._laps.time_each(key, count, lambda: self._come_and_go(prompts))

    def _come_and_go(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            reply = self._sequences.allocate(self._owner, "", prompt)
            assert reply.num_pending_tokens == len(self._head)
            self._sequences.free(self._owner, [reply.sequence_id])

    def _prepare(self) -> Prompt:
        tokens = np.concatenate((self._head, self._tails.next()))
        return self._sequences.prepare(tokens, NO_EXTRA_KEYS)
