"""`bench tensors`: how long the tensors of a call take to the daemon and back, beside memcpy.

A Decode brings q, k and v and takes its output away: in the messages, by reference (see
`client.arena`), and from where they lie, in memory of `Client.empty`. From each call's time that of
its computing is taken away: the same write and attention, on memory of this process, in the same
round, over other blocks than the call before. What is left has the copies, gRPC, and the daemon's
checks in it. Each token sees itself alone, so that little is computed. A Prefill has the same
tensors, but threads of lower priority compute it, and their time is that of other work too.

Beside it is memcpy of the same bytes: q, k and v to memory that is there, as the arena is, and the
output to new memory, which the caller gets. A call takes its time even if nothing is copied, as one
from where the tensors lie does. What a call by reference takes beyond it are its copies, and those
are to be about as fast as memcpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.decode import decode
from prefixcache.attention.write_kv import write_kv
from prefixcache.bench.attention_cases import Heads, Pool
from prefixcache.bench.children import daemon_process
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds
from prefixcache.bench.report import Ratio, Report, Row, Target
from prefixcache.client import Client
from prefixcache.storage.layout import DTYPE_BYTES
from prefixcache.types import AttentionOptions, CacheUse

_ROUNDS = Rounds(fewest=10, most=60, budget_s=60.0)
_MIB = 2**20
_LEAST_RATE = 0.7
"""Of memcpy's, for the copies of calls of 16 MiB and more."""
_ITSELF = AttentionOptions(window=1)
_MEMCPY = "memcpy"

Way = Literal["where they lie", "by reference", "in the messages"]
_WAYS: tuple[Way, ...] = ("where they lie", "by reference", "in the messages")


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """mebibytes: of q, k, v and the output of a call together."""

    mebibytes: tuple[float, ...] = (0.0625, 1, 16, 64)
    dtype: str = "bfloat16"
    heads: Heads = field(default_factory=Heads)
    rounds: Rounds = _ROUNDS


def quick_settings() -> TensorSettings:
    """Small sizes and one round."""
    return TensorSettings(mebibytes=(0.0625, 1), rounds=Rounds.exactly(1))


@dataclass(frozen=True, slots=True)
class Key:
    """part: the whole call, what is left without its computing, or what copying adds to it."""

    mebibytes: float
    name: str
    part: Literal["call", "transport", "copies"] = "call"


def bench_tensors(settings: TensorSettings, progress: Progress) -> Report:
    """Measure everything. Raises UnavailableError if the daemon does not start."""
    start = time.perf_counter()
    laps: Laps[Key] = Laps()
    heads, largest = settings.heads, max(settings.mebibytes)
    num_blocks = -(-_num_tokens(settings, largest) // heads.block_size)
    layout = (
        *("--num-layers", "1", "--num-kv-heads", str(heads.num_kv_heads)),
        *("--head-dim", str(heads.head_dim), "--dtype", settings.dtype),
        *("--block-size", str(heads.block_size), "--num-blocks", str(2 * num_blocks)),
    )
    arena_bytes = round(3 * sum(settings.mebibytes) * _MIB)
    with ExitStack() as stack:
        target = stack.enter_context(daemon_process("--storage", "cpu", *layout))
        sharing = stack.enter_context(Client(target, arena_bytes=arena_bytes))
        clients: dict[Way, Client] = {
            "where they lie": sharing,
            "by reference": sharing,
            "in the messages": stack.enter_context(Client(target, arena_bytes=0)),
        }
        turns = [Turn(settings, size, clients, laps) for size in settings.mebibytes]
        run_rounds(
            [turn.run for turn in turns],
            settings.rounds,
            warmed_up=laps.clear,
            on_round=partial(progress, "calls"),
        )
    return Report(
        bench="tensors",
        machine=machine_facts(),
        settings=asdict(settings),
        rows=tuple(row for size in settings.mebibytes for row in _rows(laps, size)),
        seconds=time.perf_counter() - start,
    )


def _num_tokens(settings: TensorSettings, mebibytes: float) -> int:
    """Whose q, k, v and output take so much."""
    heads = settings.heads
    elements = 2 * heads.num_kv_heads * (heads.group + 1) * heads.head_dim
    num_bytes = elements * DTYPE_BYTES[settings.dtype]
    return max(1, round(mebibytes * _MIB / num_bytes))


class Turn:
    """All that is compared at one size, once a round."""

    def __init__(
        self,
        settings: TensorSettings,
        mebibytes: float,
        clients: dict[Way, Client],
        laps: Laps[Key],
    ) -> None:
        heads = settings.heads
        num_tokens = _num_tokens(settings, mebibytes)
        num_blocks = -(-num_tokens // heads.block_size)
        pool = Pool(heads.layout(settings.dtype), heads.group, 2 * num_blocks, "cpu")
        self._mebibytes, self._clients, self._laps = mebibytes, clients, laps
        self._token_ids = range(num_tokens)
        self._pool = pool
        self._q = pool.queries(num_tokens)
        self._k, self._v = pool.new_tokens(num_tokens), pool.new_tokens(num_tokens)
        inputs = (self._q, self._k, self._v)
        self._copied = [(tensor, torch.zeros_like(tensor)) for tensor in inputs]
        self._out = torch.zeros_like(self._q)
        sharing = clients["where they lie"]
        self._lying = [sharing.empty(t.shape, t.dtype).copy_(t) for t in (*inputs, self._out)]
        self._batches = [
            make_batch([pool.take(num_tokens)], [0], [num_tokens], [0], heads.block_size)
            for _ in range(2)
        ]

    def run(self) -> None:
        key = Key(self._mebibytes, _MEMCPY)
        self._laps.add(key, self._timed(self._copy))
        left = iter(self._batches)
        computing_s = self._timed(lambda: self._compute(next(left)))
        taken_s: dict[Way, float] = {}
        for way, client in self._clients.items():
            key = replace(key, name=way)
            call_s = taken_s[way] = self._call(way, client)
            self._laps.add(key, call_s)
            self._laps.add(replace(key, part="transport"), call_s - computing_s)
        copies_s = taken_s["by reference"] - taken_s["where they lie"]
        self._laps.add(Key(self._mebibytes, "by reference", "copies"), copies_s)

    def _copy(self) -> None:
        # Bits, by numpy and in one thread, as the client does it.
        for source, target in self._copied:
            target.view(torch.int16).numpy()[...] = source.view(torch.int16).numpy()
        self._out.view(torch.int16).numpy().copy()

    def _compute(self, batch: AttentionBatch) -> None:
        cache = self._pool.cache
        write_kv(cache, self._k, self._v, batch.slot_mapping)
        decode(self._q, cache, batch, _ITSELF, self._out)

    def _call(self, way: Way, client: Client) -> float:
        q, k, v, out = self._q, self._k, self._v, None
        if way == "where they lie":
            q, k, v, out = self._lying
        sequences = [client.sequence(self._token_ids, cache_use=CacheUse.NONE) for _ in range(2)]
        left = iter(sequences)
        call_s = self._timed(lambda: next(left).decode(0, q, k, v, _ITSELF, out=out))
        client.free(sequences)
        return call_s

    def _timed(self, call: Callable[[], object]) -> float:
        """The second of two calls: the first leaves caches and the allocator alike for all."""
        call()
        start = self._laps.now()
        call()
        return self._laps.now() - start


def _rows(laps: Laps[Key], mebibytes: float) -> Iterator[Row]:
    section, labels = _section(mebibytes), _labels(mebibytes)
    copied = laps.summary(Key(mebibytes, _MEMCPY))
    yield Row(section=section, name=_MEMCPY, summary=copied, labels=labels)
    for way in _WAYS:
        key = Key(mebibytes, way)
        yield Row(section=section, name=f"{way}: call", summary=laps.summary(key), labels=labels)
        yield _beside_memcpy(laps, replace(key, part="transport"), "without its computing")
        if way == "by reference":
            target = Target(round(1 / _LEAST_RATE, 2), of=_MEMCPY) if mebibytes >= 16 else None
            yield _beside_memcpy(laps, replace(key, part="copies"), "its copies", target)


def _beside_memcpy(laps: Laps[Key], key: Key, what: str, target: Target | None = None) -> Row:
    summary = laps.summary(key)
    copied = laps.summary(Key(key.mebibytes, _MEMCPY))
    return Row(
        section=_section(key.mebibytes),
        name=f"{key.name}: {what}",
        summary=summary,
        labels=_labels(key.mebibytes),
        ratios=(Ratio(_MEMCPY, summary.median / copied.median),),
        target=target,
    )


def _section(mebibytes: float) -> str:
    return f"Decode with {mebibytes:g} MiB of tensors"


def _labels(mebibytes: float) -> dict[str, str]:
    return {"mebibytes": str(mebibytes)}
