"""A short call beside long ones of another client: how much later do its slowest ones come?

The short call is a Lookup of 100 tokens from this process. The long ones come from a process of
their own, without pause: Lookups of 131,072 tokens, or Prefills. Alone and beside take turns. An
echo of the same sizes is measured beside the same load, which shows what the load costs by taking
the machine's cores, whatever the daemon does. The process that makes the load has a lower priority,
for the echo's turns too: on few cores its own work would delay the short call, not the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import grpc

from prefixcache.bench.children import LoadProcess, daemon_process, load_process
from prefixcache.bench.echo import echo_stub
from prefixcache.bench.load import LOAD_NICENESS
from prefixcache.bench.measure import Candidate, Laps, Progress, Rounds, quantile, run_rounds
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Row, Target
from prefixcache.client import Client

SECTION = "A short call beside long ones"
_ALONE = "alone"
_P99_ALONE = "p99 alone"
_P99 = "p99"
_ECHO = "echo of its size"
_LIMIT = 3.0
_ROUNDS = Rounds(fewest=3, most=6, budget_s=15.0)
ECHO_REPLY_BYTES = 8
"""As many as a Lookup's reply has, or so."""


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """tokens: of the short Lookup. calls: of it in a turn. layout: of the daemon that prefills."""

    tokens: int = 100
    lookup_tokens: int = 131_072
    prefill_tokens: int = 4_096
    calls: int = 300
    layout: tuple[str, ...] = (
        *("--num-layers", "1", "--num-kv-heads", "2", "--head-dim", "64", "--dtype", "float32"),
        *("--num-blocks", "2000"),
    )
    rounds: Rounds = _ROUNDS


@dataclass(frozen=True, slots=True)
class Key:
    """quantity: a call's latency, or the p99 of a turn."""

    call: str
    beside: str
    quantity: str = "latency"


@dataclass(frozen=True, slots=True)
class FairnessLaps:
    """Of the short calls, and how many long ones there were in a second, by their names."""

    short: Laps[Key] = field(default_factory=Laps[Key])
    long: Laps[str] = field(default_factory=Laps[str])

    def clear(self) -> None:
        self.short.clear()
        self.long.clear()

    def add_all(self, other: FairnessLaps) -> None:
        self.short.add_all(other.short)
        self.long.add_all(other.long)


def measure_fairness(
    settings: FairnessSettings, target: str, channel: grpc.Channel, progress: Progress
) -> FairnessLaps:
    """The short call and its echo, alone and beside.

    target: the daemon that gets the long Lookups; one that prefills is started here. channel: to
    an echo that replies with ECHO_REPLY_BYTES.
    """
    laps = FairnessLaps()
    with ExitStack() as stack:
        progress("starting other clients", 0.0)
        prefilling = stack.enter_context(daemon_process("--storage", "cpu", *settings.layout))
        echo = partial(echo_stub(channel, ECHO_REPLY_BYTES), bytes(4 * settings.tokens))
        candidates: list[Candidate] = []
        for address, kind, num_tokens in (
            (target, "lookup", settings.lookup_tokens),
            (prefilling, "prefill", settings.prefill_tokens),
        ):
            client = stack.enter_context(Client(address))
            load = stack.enter_context(load_process(address, kind, num_tokens))
            calls: dict[str, Callable[[], object]] = {
                f"Lookup of {settings.tokens} tokens": partial(
                    client.lookup, Prompts(settings.tokens).next()
                ),
                _ECHO: echo,
            }
            beside = f"{kind} of {num_tokens:,} tokens".capitalize()
            turn = Turn(beside, load, calls, settings.calls, laps)
            candidates += [turn.alone, turn.beside]
        run_rounds(
            candidates,
            settings.rounds,
            warmed_up=laps.clear,
            on_round=partial(progress, "short beside long calls"),
        )
    return laps


def fairness_rows(laps: FairnessLaps) -> tuple[Row, ...]:
    """Of the short call and its echo, and of how many long ones ran."""
    return (
        *(_row(laps.short, key) for key in laps.short if key.quantity != _P99),
        *(_load_row(laps.long, name) for name in laps.long),
    )


class Turn:
    """Short calls alone, and the same ones beside a load."""

    def __init__(
        self,
        name: str,
        load: LoadProcess,
        calls: dict[str, Callable[[], object]],
        count: int,
        laps: FairnessLaps,
    ) -> None:
        self._name, self._load, self._calls, self._count = name, load, calls, count
        self._laps, self._long_calls = laps.short, laps.long

    def alone(self) -> None:
        for name in self._calls:
            self._run(name, f"{_ALONE}, before {self._name}")

    def beside(self) -> None:
        for name in self._calls:
            start = self._laps.now()
            with self._load.running() as done:
                self._run(name, self._name)
            self._long_calls.add(self._name, done[0] / (self._laps.now() - start))

    def _run(self, name: str, beside: str) -> None:
        key = Key(name, beside)
        for _ in range(self._count):
            self._laps.time(key, self._calls[name])
        turn = sorted(self._laps.samples(key)[-self._count :])
        self._laps.add(replace(key, quantity=_P99), quantile(turn, 0.99))


def _row(laps: Laps[Key], key: Key) -> Row:
    is_beside, is_echo = not key.beside.startswith(_ALONE), key.call == _ECHO
    ratios: tuple[Ratio, ...] = ()
    if is_beside:
        alone = replace(key, beside=f"{_ALONE}, before {key.beside}")
        ratios = (Ratio(_P99_ALONE, _p99(laps, key) / _p99(laps, alone)),)
    if is_beside and not is_echo:
        echo = replace(key, call=_ECHO)
        ratios = (*ratios, Ratio("the echo's p99", _p99(laps, key) / _p99(laps, echo)))
    return Row(
        section=SECTION,
        name=key.call,
        summary=laps.summary(key),
        labels={"beside": key.beside, "load_niceness": LOAD_NICENESS},
        ratios=ratios,
        target=Target(_LIMIT, of=_P99_ALONE) if is_beside and not is_echo else None,
    )


def _p99(laps: Laps[Key], key: Key) -> float:
    """The median of the turns' p99s: a turn that something else has disturbed does not count."""
    return laps.summary(replace(key, quantity=_P99)).median


def _load_row(long_calls: Laps[str], name: str) -> Row:
    return Row(
        section=SECTION + ": the long ones",
        name=name,
        summary=long_calls.summary(name),
        unit="per_s",
    )
