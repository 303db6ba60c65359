"""`bench rpc`: each call beside an echo of the same sizes.

A daemon and an echo server in processes of their own, this process the client of both, with bytes
that are ready before the clock starts. The echo is the same gRPC server with the same threads and
options; it is sent as many bytes as the call's request has, and returns as many as its reply has.
So the ratio is what the daemon's work adds to what gRPC costs on this machine, less what it saves:
it asks for requests before it wakes a thread for them (`prefixcache.server.incoming_calls`), which
gRPC does not. The same calls through the Python client show what that adds. Processes that differ
in nothing differ by up to 40 % in speed, as long as they live: so all is measured with several
daemons and echoes, one pair after another, and summed up over all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Literal

import grpc

from prefixcache.bench.calls import (
    BATCH,
    Connection,
    Kind,
    Sizes,
    make_kinds,
    message_sizes,
)
from prefixcache.bench.children import daemon_process, echo_process
from prefixcache.bench.client_calls import make_client_kinds
from prefixcache.bench.echo import echo_stub
from prefixcache.bench.engine_step import measure_engine_step
from prefixcache.bench.fairness import (
    ECHO_REPLY_BYTES,
    FairnessLaps,
    FairnessSettings,
    fairness_rows,
    measure_fairness,
)
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Candidate, Laps, Progress, Rounds, run_rounds
from prefixcache.bench.report import Ratio, Report, Row, Target
from prefixcache.bench.split import measure_split
from prefixcache.bench.step_appends import measure_step_appends
from prefixcache.client import Client
from prefixcache.client.channel import channel_options, resolve_address
from prefixcache.rpc.status import from_rpc_error

_ROUNDS = Rounds(fewest=2, most=8, budget_s=20.0)
_SPLIT_ROUNDS = Rounds(fewest=4, most=20, budget_s=15.0)
_FEWEST_A_THREAD = 10
NUM_WORKERS = 16
"""The daemon's default, and the echo's."""
_SUFFIXES = {"rpc": "", "echo": ": echo", "client": ": Python client"}
_TARGETS = {"Lookup": 1.25, f"Append, {BATCH} rows": 1.25, "Allocate": 1.3}


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """What `bench rpc` measures.

    tokens: of the prompts. in_flight: threads of this process that call. calls: made in a burst,
    but at least 10 a thread. target: a daemon that runs already. pairs: of a daemon and an echo,
    which the rounds are for.
    """

    tokens: int = 2_000
    in_flight: tuple[int, ...] = (1, 8, 64)
    calls: int = 200
    num_blocks: int = 200_000
    target: str | None = None
    pairs: int = 3
    rounds: Rounds = _ROUNDS
    split_rounds: Rounds = _SPLIT_ROUNDS
    fairness: FairnessSettings = field(default_factory=FairnessSettings)


def quick_settings() -> RpcSettings:
    """Small sizes and one round."""
    once = Rounds.exactly(1)
    return RpcSettings(
        in_flight=(1, 4),
        calls=20,
        num_blocks=20_000,
        pairs=1,
        rounds=once,
        split_rounds=once,
        fairness=FairnessSettings(lookup_tokens=16_384, prefill_tokens=512, calls=20, rounds=once),
    )


def with_rounds(settings: RpcSettings, count: int) -> RpcSettings:
    exactly = Rounds.exactly(count)
    fairness = replace(settings.fairness, rounds=exactly)
    return replace(settings, rounds=exactly, split_rounds=exactly, fairness=fairness)


Caller = Literal["rpc", "echo", "client"]


@dataclass(frozen=True, slots=True)
class Key:
    """caller: `rpc` sends bytes to the daemon, `echo` to the echo, `client` is the Python client.

    quantity: `latency` in seconds, or `rate` in calls a second.
    """

    call: str
    caller: Caller
    in_flight: int
    quantity: str = "latency"


def bench_rpc(settings: RpcSettings, progress: Progress) -> Report:
    """Measure everything. Raises UnavailableError if a process does not start, and the errors of
    calls that fail.
    """
    start = time.perf_counter()
    facts = machine_facts()
    try:
        rows = _measure(settings, progress)
    except grpc.RpcError as failure:
        raise from_rpc_error(failure) from failure
    return Report(
        bench="rpc",
        machine=facts,
        settings=asdict(settings),
        rows=rows,
        seconds=time.perf_counter() - start,
    )


def _measure(settings: RpcSettings, progress: Progress) -> tuple[Row, ...]:
    laps, fairness = Laps[Key](), FairnessLaps()
    for number in range(1, settings.pairs + 1):
        with ExitStack() as stack:
            pair = _Pair(settings, progress, f"servers {number} of {settings.pairs}: ", stack)
            laps.add_all(pair.measure_calls())
            fairness.add_all(pair.measure_fairness())
            if number == settings.pairs:
                rest = pair.measure_rest()
    steps, split = rest
    return (*_rows(laps, pair.sizes), *steps, *fairness_rows(fairness), *split)


class _Pair:
    """A daemon and an echo, and the clients of both; `stack` ends them."""

    def __init__(
        self, settings: RpcSettings, progress: Progress, title: str, stack: ExitStack
    ) -> None:
        self._settings, self._stack = settings, stack
        self._progress: Progress = lambda step, part: progress(title + step, part)
        target = settings.target
        if target is None:
            flags = ("--storage", "none", "--num-blocks", str(settings.num_blocks))
            target = stack.enter_context(daemon_process(*flags))
        self._target = target
        self._progress("making sequences", 0.0)
        channel = stack.enter_context(_channel(target))
        self._by_thread = [
            make_kinds(Connection(channel), settings.tokens, stack)
            for _ in range(max(settings.in_flight))
        ]
        self._client = stack.enter_context(Client(target))
        self.sizes = message_sizes(self._by_thread[0])
        replies = [ECHO_REPLY_BYTES, *(size.reply for size in self.sizes.values())]
        echo_target = stack.enter_context(echo_process(replies, NUM_WORKERS))
        self._echo = stack.enter_context(_channel(echo_target))

    def measure_calls(self) -> Laps[Key]:
        settings, laps = self._settings, Laps[Key]()
        client_kinds = make_client_kinds(self._client, settings.tokens, self._stack)
        threads = ThreadPoolExecutor(len(self._by_thread), "client")
        bursts = Bursts(self._stack.enter_context(threads), settings.calls, laps)
        callers: dict[Caller, list[dict[str, Kind]]] = {
            "rpc": self._by_thread,
            "client": [client_kinds],
        }
        run_rounds(
            list(_candidates(settings, bursts, callers, self._echo, self.sizes)),
            settings.rounds,
            warmed_up=laps.clear,
            on_round=partial(self._progress, "calls"),
        )
        return laps

    def measure_fairness(self) -> FairnessLaps:
        return measure_fairness(self._settings.fairness, self._target, self._echo, self._progress)

    def measure_rest(self) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """Steps, and the parts of a call: what is compared is in one process, so one will do."""
        settings, client = self._settings, self._client
        steps: tuple[Row, ...] = ()
        if "commit" in client.server_info().capabilities:
            steps = measure_engine_step(
                client, settings.tokens, settings.split_rounds, self._progress
            )
        steps += measure_step_appends(client, settings.split_rounds, self._progress)
        split = measure_split(
            settings.tokens, self._echo, self.sizes, settings.split_rounds, self._progress
        )
        return steps, split


def _candidates(
    settings: RpcSettings,
    bursts: Bursts,
    callers: dict[Caller, list[dict[str, Kind]]],
    echo: grpc.Channel,
    sizes: dict[str, Sizes],
) -> Iterator[Candidate]:
    """Each call by each caller, who has the kinds of as many threads as ever call, beside its echo.

    A caller with fewer threads than calls that are to be in flight is left out.
    """
    for in_flight, name in product(settings.in_flight, sizes):
        for caller, kinds_by_thread in callers.items():
            kinds = [kinds[name] for kinds in kinds_by_thread[:in_flight]]
            if len(kinds) == in_flight:
                yield partial(bursts.run, Key(name, caller, in_flight), kinds)
        echoes = [Echoes(echo, sizes[name])] * in_flight
        yield partial(bursts.run, Key(name, "echo", in_flight), echoes)


def _channel(target: str) -> grpc.Channel:
    return grpc.insecure_channel(resolve_address(target).target, channel_options())


class Echoes:
    """Calls of the echo, with messages of these sizes."""

    def __init__(self, channel: grpc.Channel, sizes: Sizes) -> None:
        self._call = partial(echo_stub(channel, sizes.reply), bytes(sizes.request))

    def make(self, count: int) -> list[Callable[[], object]]:
        return [self._call] * count

    def clean_up(self) -> None:
        pass


class Bursts:
    """Many calls from as many threads as are to be in flight. `calls`: in all, at least."""

    def __init__(self, threads: ThreadPoolExecutor, calls: int, laps: Laps[Key]) -> None:
        self._threads, self._calls, self._laps = threads, calls, laps

    def run(self, key: Key, kinds: Sequence[Kind]) -> None:
        """One burst, one kind of call a thread: each call's latency, and the rate of all."""
        a_thread = max(_FEWEST_A_THREAD, self._calls // len(kinds))
        ready = [kind.make(a_thread) for kind in kinds]
        barrier = threading.Barrier(len(kinds) + 1)
        running = [self._threads.submit(_call_all, calls, barrier) for calls in ready]
        barrier.wait()
        start = time.perf_counter()
        latencies = [latency for thread in running for latency in thread.result()]
        seconds = time.perf_counter() - start
        for latency in latencies:
            self._laps.add(key, latency)
        self._laps.add(replace(key, quantity="rate"), len(latencies) / seconds)
        for kind in kinds:
            kind.clean_up()


def _call_all(calls: Sequence[Callable[[], object]], barrier: threading.Barrier) -> list[float]:
    barrier.wait()
    latencies = []
    for call in calls:
        start = time.perf_counter()
        call()
        latencies.append(time.perf_counter() - start)
    return latencies


def _rows(laps: Laps[Key], sizes: dict[str, Sizes]) -> Iterator[Row]:
    """Latencies by how many calls are in flight, then rates."""
    for key in sorted(laps, key=lambda key: key.quantity):
        summary, echo = laps.summary(key), laps.summary(replace(key, caller="echo"))
        is_latency = key.quantity == "latency"
        ratios = [Ratio("echo", summary.median / echo.median)]
        if is_latency:
            ratios.append(Ratio("echo at p99", summary.p99 / echo.p99))
        limit = _TARGETS.get(key.call) if is_latency and key.in_flight == 1 else None
        yield Row(
            section=f"{key.in_flight} in flight" if is_latency else "Calls a second",
            name=key.call + _SUFFIXES[key.caller],
            summary=summary,
            unit="s" if is_latency else "per_s",
            labels={
                "in_flight": key.in_flight,
                "request_bytes": sizes[key.call].request,
                "reply_bytes": sizes[key.call].reply,
            },
            ratios=() if key.caller == "echo" else tuple(ratios),
            target=Target(limit, of="echo") if limit and key.caller == "rpc" else None,
        )
